"""Environments that seed the global generators with nothing have the same bits in every run."""

from __future__ import annotations

import random

import pytest
import torch
from environments import EchoEnv
from seeding import Seeding
from tensordict import TensorDictBase
from torchrl.modules import RandomPolicy

from torchrl_hts import Evaluator, HTSCollector

pytestmark = pytest.mark.usefixtures("nothing_left")


def gather(num_executors: int) -> TensorDictBase:
    with HTSCollector(
        [Seeding] * 3,
        None,
        frames_per_batch=3 * 10,
        total_frames=3 * 10,
        num_executors=num_executors,
        seed=0,
    ) as collector:
        return next(iter(collector)).clone()


def test_resets_without_a_seed_give_the_same_bits_in_every_run() -> None:
    one, other = gather(1), gather(3)
    assert (one == other).all()
    drawn = one["observation"]
    assert len(torch.unique(drawn[..., 0])) == drawn[..., 0].numel()  # and each its own
    assert len(torch.unique(drawn[..., 1])) == drawn[..., 1].numel()


def test_evaluations_likewise() -> None:
    returns = []
    for _ in range(2):
        with Evaluator(Seeding, RandomPolicy(), num_episodes=2) as evaluator:
            evaluator.submit(0)
            evaluator.submit(1)
            returns.append([evaluation.returns for evaluation in evaluator.wait()])
    assert returns[0] == returns[1]


def test_this_process_seeds_as_ever() -> None:
    with HTSCollector([EchoEnv] * 2, None, frames_per_batch=4, total_frames=4) as collector:
        next(iter(collector))
    random.seed(1)
    first = random.random()
    random.seed()
    again = random.random()
    random.seed(1)
    assert random.random() == first
    random.seed()
    assert random.random() != again
