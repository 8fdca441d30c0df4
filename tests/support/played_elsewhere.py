"""Environments that play in threads or on other machines give the bits of those in a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from policies import categorical
from tensordict import TensorDictBase

from torchrl_hts import HTSCollector

Make = Callable[[], Any]


def start(factories: list[Make], num_inputs: int = 4, **options: Any) -> HTSCollector:
    """A collector of rounds of 12 steps."""
    options = {"num_actors": 1, "seed": 5, "frames_per_batch": 12 * len(factories)} | options
    return HTSCollector(factories, categorical(num_inputs), **options)


def gather(collector: HTSCollector, rounds: int = 2) -> TensorDictBase:
    """So many rounds."""
    batches = iter(collector)
    return torch.stack([next(batches).clone() for _ in range(rounds)])


def gather_twice(factories: list[Make], **options: Any) -> TensorDictBase:
    """Two rounds, seeds given again, and two more."""
    with start(factories, **options) as collector:
        gathered = gather(collector)
        collector.set_seed(7)
        return torch.cat([gathered, gather(collector)])


def check_going_on(here: Make, elsewhere: Make, num_inputs: int = 4) -> None:
    """A run that is saved goes on as one whose environments are in an executor's process would."""
    with start([here] * 2, num_inputs, num_executors=1) as collector:
        expected = gather(collector, 4)
    with start([elsewhere] * 2, num_inputs, num_executors=1) as collector:
        assert (gather(collector) == expected[:2]).all()
        state = collector.state_dict()
        assert not state["why_environments_are_lost"]
    with start([elsewhere] * 2, num_inputs, num_executors=2) as collector:
        collector.load_state_dict(state)
        assert (gather(collector) == expected[2:]).all()
