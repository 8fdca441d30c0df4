"""One rank alone has values that are no numbers: all end soon, and it is named."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import EchoEnv
from policies import categorical
from processes import wait_until_gone
from ranks import Outcome, run_ranks
from torch import nn

from torchrl_hts import DelayedGradient, HTSCollector, World, keep_servers

NUM_ENVS, ALPHA = 4, 5
SOON_S = 60.0  # starting included, on a machine that may be busy


class Diverges(EchoEnv):
    """Gives NaN in its second round."""

    def __init__(self, what: str) -> None:
        super().__init__(lengths=(10**9,))
        self.what = what

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        if self.t == ALPHA + 3:
            if self.what == "reward":
                reward = math.nan
            else:
                observation[1] = math.nan
        return observation, reward, *rest


def train(what: str, shards: int | None, directory: Path) -> None:
    """The last environment diverges, or the loop of rank 1 spoils what it has got.

    Leaves the numbers of all workers behind, and what was warned of.
    """
    policy = categorical()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    last = EchoEnv if what == "batch" else partial(Diverges, what)
    with (
        warnings.catch_warnings(record=True) as warned,
        keep_servers(),
        World(shards=shards, timeout_s=200) as world,
        HTSCollector(
            [EchoEnv] * (NUM_ENVS - 1) + [last],
            policy,
            frames_per_batch=NUM_ENVS * ALPHA,
            total_frames=NUM_ENVS * ALPHA * 10,
            seed=0,
            num_executors=1,
            world=world,
        ) as collector,
    ):
        warnings.simplefilter("always")
        file = directory / str(world.rank)
        file.write_text(" ".join(map(str, collector.worker_pids().values())))
        delayed = DelayedGradient(policy)
        for batch in collector:
            if what == "batch" and world.rank == 1:
                batch["next", "reward"][0, 0] = math.nan
            with delayed(batch):
                for part in world.gradients(policy, batch):
                    log_prob = policy.get_dist(part.clone()).log_prob(part["action"])
                    (log_prob * part["next", "reward"].squeeze(-1)).mean().backward()
                file.with_suffix(".warned").write_text("\n".join(str(w.message) for w in warned))
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


def end(what: str, shards: int | None, directory: Path) -> list[Outcome]:
    outcomes = run_ranks(train, 2, what, shards, directory)
    for outcome in outcomes:
        assert outcome.took_s < SOON_S, outcomes
    for rank in range(2):
        wait_until_gone(map(int, (directory / str(rank)).read_text().split()))
    return outcomes


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("what", ["reward", "observation"])
def test_a_rank_whose_environment_gives_nan_is_named(
    what: str, shards: int | None, tmp_path: Path
) -> None:
    first, second = end(what, shards, tmp_path)
    assert second.error.startswith("WorkerError: environment 3 ")
    assert "NaN" in second.error
    # Here, or where it begins: its executors may be a round ahead.
    assert first.error.startswith("WorldError: rank 1 did not come to '")
    assert "it has ended" in first.error


@pytest.mark.parametrize("shards", [None, 2])
def test_a_rank_whose_gradients_are_nan_is_named(shards: int | None, tmp_path: Path) -> None:
    for rank, outcome in enumerate(end("batch", shards, tmp_path)):
        assert outcome.error.startswith(("WorkerError: the policy ", "WorldError: rank "))
        assert "NaN" in outcome.error or f"rank {1 - rank} " in outcome.error
        warned = (tmp_path / f"{rank}.warned").read_text()
        assert "the gradients of rank 1 alone are infinite or NaN" in warned
