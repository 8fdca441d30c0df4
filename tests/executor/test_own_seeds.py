"""Environments that seed what they draw from with nothing have the same bits in every run."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import EchoEnv
from gymnasium.utils.seeding import np_random
from seeding import Drawing, Forking, Late, Sampling, Seeding, Unseeded
from tensordict import TensorDictBase
from torchrl.modules import RandomPolicy

from torchrl_hts import EnvironmentReplay, Evaluator, HTSCollector

pytestmark = pytest.mark.usefixtures("nothing_left")


def gather(make_env: type[gym.Env[Any, Any]], num_executors: int) -> TensorDictBase:
    with HTSCollector(
        [make_env] * 3,
        None,
        frames_per_batch=3 * 10,
        total_frames=3 * 10,
        num_executors=num_executors,
        seed=0,
    ) as collector:
        return next(iter(collector)).clone()


def test_resets_without_a_seed_give_the_same_bits_in_every_run() -> None:
    one, other = gather(Seeding, 1), gather(Seeding, 3)
    assert (one == other).all()
    drawn = one["observation"]
    assert len(torch.unique(drawn[..., 0])) == drawn[..., 0].numel()  # and each its own
    assert len(torch.unique(drawn[..., 1])) == drawn[..., 1].numel()


def test_what_gymnasium_seeds_with_nothing_has_the_same_bits_in_every_run() -> None:
    """Generators of environments and spaces that are drawn from before they are seeded."""
    one, other, again = gather(Unseeded, 1), gather(Unseeded, 3), gather(Unseeded, 3)
    assert (one == other).all()
    assert (one == again).all()  # in servers that have imported the environment already
    drawn = one["observation"]
    assert len(torch.unique(drawn[:, 0, 0])) == len(torch.unique(drawn[:, 0, 1])) == 3
    assert len(torch.unique(drawn[..., 2])) == len(torch.unique(drawn[..., 3])) == 30

    replay = EnvironmentReplay(Unseeded, 1, seed=0)
    made: Any = replay.env
    assert [np.float32(made.layout), made.start] == drawn[1, 0, :2].tolist()


def test_processes_that_an_environment_forks_draw_the_same_in_every_run() -> None:
    """Python's own generator begins anew in a fork, from what the system gives."""
    one, other = gather(Forking, 1), gather(Forking, 3)
    assert (one == other).all()
    assert len(torch.unique(one["observation"][:, 0])) == 3 * 2  # and each its own


def test_i6_a_space_that_a_class_shares_is_no_tie_between_its_environments() -> None:
    one, other = gather(Sampling, 1), gather(Sampling, 3)
    assert (one == other).all()
    for column in range(2):
        assert len(torch.unique(one["observation"][:, 0, column])) == 3
    replay = EnvironmentReplay(Sampling, 2, seed=0)
    assert [np.float32(each) for each in replay.env.layout] == one["observation"][2, 0].tolist()


@pytest.mark.parametrize("make_env", [Unseeded, Drawing, Late])
def test_workers_of_a_batch_draw_each_its_own_in_every_run(
    make_env: type[gym.Env[Any, Any]],
) -> None:
    """Those of an AsyncVectorEnv are forked with one state, and spawned with none."""
    runs = []
    for num_executors, context in [(1, "fork"), (2, "fork"), (2, "spawn")]:
        batch = partial(gym.vector.AsyncVectorEnv, [make_env] * 3, context=context)
        with HTSCollector(
            [batch] * 2,
            None,
            frames_per_batch=6 * 4,
            total_frames=6 * 4,
            num_executors=num_executors,
            seed=0,
        ) as collector:
            runs.append(next(iter(collector)).clone())
    first, *others = [run.flatten_keys().to_dict() for run in runs]
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    for column in range(2):
        assert len(torch.unique(runs[0]["observation"][:, 0, column])) == 6


@pytest.mark.parametrize("make_env", [Seeding, Unseeded])
def test_evaluations_likewise(make_env: type[gym.Env[Any, Any]]) -> None:
    returns = []
    for _ in range(2):
        with Evaluator(make_env, RandomPolicy(), num_episodes=2) as evaluator:
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
    EnvironmentReplay(Unseeded, 0, seed=0).close()
    np.random.seed(0)
    seeded = np_random()[0].random()
    drawn = np.random.random()
    np.random.seed(0)
    assert np_random()[0].random() != seeded
    assert np.random.random() == drawn
