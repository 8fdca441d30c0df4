"""DistributedDataParallel in place of `World.gradients`: the loop that the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import generous_cartpole
from policies import categorical
from ranks import results, run_ranks
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, HTSCollector, World, keep_servers
from torchrl_hts.testing import digest

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "many_learners.md"


def loss_of(losses: TensorDictBase) -> Tensor:
    terms = [value for key, value in losses.items() if key.startswith("loss_")]
    return torch.stack(terms).sum()


def shown() -> str:
    """The loop of the page, for three rounds."""
    section = PAGE.read_text().partition("\n## `DistributedDataParallel`\n")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    short, replaced = re.subn(r"frames_per_batch=320", r"\g<0>, total_frames=960", code[1])
    assert replaced == 1
    return short


def names() -> dict[str, Any]:
    """What the page takes for granted."""
    torch.manual_seed(0)
    policy = categorical(num_actions=2)
    critic = ValueOperator(MLP(4, 1, num_cells=[16]), ["observation"])
    loss_module = A2CLoss(policy, critic)
    return {
        "torch": torch,
        "World": World,
        "HTSCollector": HTSCollector,
        "DelayedGradient": DelayedGradient,
        "make_env": generous_cartpole,
        "policy": policy,
        "loss_module": loss_module,
        "advantage": GAE(gamma=0.99, lmbda=0.95, value_network=critic),
        "optimizer": torch.optim.Adam(loss_module.parameters(), lr=1e-2),
        "loss_of": loss_of,
    }


def by_world(given: dict[str, Any]) -> None:
    """The same by `World.gradients`."""
    policy, loss_module, optimizer = (
        given[name] for name in ("policy", "loss_module", "optimizer")
    )
    with World(timeout_s=60) as world:
        collector = HTSCollector(
            [generous_cartpole] * 16,
            policy,
            frames_per_batch=320,
            total_frames=960,
            seed=0,
            world=world,
        )
        delayed = DelayedGradient(policy, lag=collector.lag)
        for batch in collector:
            with delayed(batch):
                for part in world.gradients(loss_module, batch):
                    with torch.no_grad():
                        given["advantage"](part)
                    loss_of(loss_module(part)).backward()
                optimizer.step()
                optimizer.zero_grad()


def train() -> tuple[str, str, str]:
    """Digests of the parameters: before, by the page, and by `World.gradients`."""
    before = digest(names()["loss_module"].parameters())
    of_page, of_world = names(), names()
    with keep_servers():
        exec(shown(), of_page)
        of_page["world"].close()
        by_world(of_world)
    return before, *(digest(each["loss_module"].parameters()) for each in (of_page, of_world))


@pytest.mark.timeout(600)  # on a machine that may be busy
def test_the_loop_with_a_wrapped_loss_trains_all_learners_alike() -> None:
    first, second = results(run_ranks(train, 2, timeout_s=400))
    assert first == second
    before, of_page, of_world = first
    assert before != of_page == of_world
