"""What `World.gradients` asks of a module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from policies import categorical
from tensordict import TensorDict
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives import A2CLoss

from torchrl_hts import World


def train(world: World, module: nn.Module) -> None:
    for part in world.gradients(module, TensorDict({"x": torch.ones(2, 4)}, [2])):
        module(part["x"]).sum().backward()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).abs()


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 3, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x.long())


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.Tanh(), ValueError, "no parameter with requires_grad"),
        (nn.Linear(4, 1).requires_grad_(False), ValueError, "no parameter with requires_grad"),
        (nn.Sequential(nn.LazyLinear(1)), ValueError, "parameter '0.weight' is uninitialised"),
        (Complex(), TypeError, r"of torch.complex64, .* \(torch.view_as_complex\)"),
        (
            nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1).double()),
            TypeError,
            "several data types, torch.float32, torch.float64: give them one",
        ),
        (Words(sparse=True), ValueError, "a sparse gradient, .* with sparse=False"),
    ],
)
def test_gradients_that_cannot_be_averaged_are_refused_in_a_sentence(
    module: nn.Module, error: type[Exception], message: str, shards: World
) -> None:
    with pytest.raises(error, match=message):
        train(shards, module)


def test_what_the_refusals_advise_works(shards: World) -> None:
    lazy = nn.Sequential(nn.LazyLinear(1), nn.Linear(1, 1).requires_grad_(False))
    lazy(torch.ones(2, 4))
    for module in (lazy, Words(sparse=False)):
        train(shards, module)
        assert all((p.grad is not None) == p.requires_grad for p in module.parameters())


def test_parameters_that_are_all_frozen_later_are_told_too(shards: World) -> None:
    module = nn.Linear(4, 1)
    train(shards, module)
    with pytest.raises(ValueError, match="no parameter with requires_grad"):
        train(shards, module.requires_grad_(False))


def test_a_network_that_a_loss_of_torchrl_has_hidden_is_looked_through(shards: World) -> None:
    critic = ValueOperator(nn.DataParallel(nn.Linear(4, 1)), ["observation"])
    with pytest.raises(ValueError, match=r"part 'critic_network.module' is wrapped in DataPara"):
        train(shards, A2CLoss(categorical(num_actions=2), critic))


def test_a_sharded_part_is_named(shards: World, tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        inner = nn.Linear(4, 1)
        fully_shard(inner, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"the module's part '0' is sharded \(FSDPLinear\)"):
            train(shards, nn.Sequential(inner))
        spread = nn.Linear(4, 1)
        weight = distribute_tensor(spread.weight.detach(), init_device_mesh("cpu", (1,)))
        spread.weight = nn.Parameter(weight)
        with pytest.raises(ValueError, match=r"the module's part '1' is sharded \(Linear\)"):
            train(shards, nn.Sequential(nn.Tanh(), spread))
    finally:
        distributed.destroy_process_group()
