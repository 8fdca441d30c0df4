"""What `World.gradients` asks of a module when it first sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from policies import categorical
from tensordict import TensorDict
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives import A2CLoss

from torchrl_hts import World


@pytest.fixture
def shards() -> Iterator[World]:
    """A learner alone, of whose batch two shards are made."""
    threads = torch.get_num_threads()
    with World(shards=2) as world:
        yield world
    torch.set_num_threads(threads)


def train(world: World, module: nn.Module) -> None:
    for part in world.gradients(module, TensorDict({"x": torch.ones(2, 4)}, [2])):
        module(part["x"]).sum().backward()


def test_a_network_that_a_loss_of_torchrl_has_hidden_is_looked_through(shards: World) -> None:
    critic = ValueOperator(nn.DataParallel(nn.Linear(4, 1)), ["observation"])
    with pytest.raises(ValueError, match=r"part 'critic_network.module' is wrapped in DataPara"):
        train(shards, A2CLoss(categorical(num_actions=2), critic))


def test_a_sharded_part_is_named(shards: World, tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        inner = nn.Linear(4, 1)
        fully_shard(inner, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"the module's part '0' is sharded \(FSDPLinear\)"):
            train(shards, nn.Sequential(inner))
    finally:
        distributed.destroy_process_group()
