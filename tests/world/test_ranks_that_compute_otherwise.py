"""What a rank's libraries make of the same values is compared before the first update."""

from __future__ import annotations

import os
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from environments import EchoEnv
from ranks import run_ranks
from torch import Tensor

from torchrl_hts import HTSCollector, World


def act(observation: Tensor, sloppy: bool) -> Tensor:
    """A policy; a sloppy one's actions differ with the number of rows."""
    return torch.zeros(len(observation), dtype=torch.int64) + sloppy * (len(observation) % 2)


def collect() -> None:
    odd = os.environ["RANK"] == "1"
    with World(shards=2, timeout_s=60) as world:
        HTSCollector(
            [EchoEnv] * 8,
            partial(act, sloppy=odd),
            frames_per_batch=16,
            num_executors=1,
            world=world,
        ).shutdown()


@pytest.mark.timeout(120)
def test_a_rank_that_calibrates_otherwise_is_named() -> None:
    for outcome in run_ranks(collect, 2):
        assert outcome.error.startswith("WorldError: rank 1 has calibration ")
        assert "batches of" in outcome.error


def add_otherwise(who: str) -> None:
    """With a backend that adds something of its own."""
    real, times, rank = dist.all_reduce, count(1), int(os.environ["RANK"])

    def all_reduce(vector: Tensor, **kwargs: Any) -> None:
        real(vector, **kwargs)
        vector[0] += next(times) if who == "each time" else rank

    dist.all_reduce = all_reduce
    World(timeout_s=60)


@pytest.mark.parametrize("who", ["each time", "each rank"])
def test_a_backend_whose_sums_vary_is_found_out(who: str) -> None:
    for outcome in run_ranks(add_otherwise, 2, who):
        assert outcome.error.startswith("WorldError: the sum of the same values had different bits")
        assert "World(shards=...)" in outcome.error
