"""Statistics of observations and rewards: the same bits for every number of learners."""

from __future__ import annotations

import os
from functools import partial

import gymnasium as gym
import pytest
import torch
from ranks import run_ranks
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, NormalParamExtractor, ProbabilisticActor

from torchrl_hts import (
    DelayedGradient,
    HTSCollector,
    RunningNorm,
    RunningRewardNorm,
    World,
    WorldError,
    keep_servers,
)
from torchrl_hts.testing import digest

NUM_ENVS, ALPHA, ROUNDS = 8, 5, 5


def train(shards: int | None, *, forgets: bool = False) -> list[str]:
    """A digest of all that was learned and counted, after each round.

    Args:
        forgets: to say that there are other learners.
    """
    torch.manual_seed(0)
    norm, rewards = RunningNorm(3), RunningRewardNorm(NUM_ENVS, gamma=0.9)
    policy = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(norm, nn.Linear(3, 2), NormalParamExtractor()),
            ["observation"],
            ["loc", "scale"],
        ),
        ["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    delayed = DelayedGradient(policy)
    found = []
    with (
        World(shards=shards, timeout_s=60) as world,
        HTSCollector(
            [partial(gym.make, "Pendulum-v1")] * NUM_ENVS,
            policy,
            frames_per_batch=NUM_ENVS * ALPHA,
            total_frames=NUM_ENVS * ALPHA * ROUNDS,
            seed=0,
            num_executors=1,
            world=world,
        ) as collector,
    ):
        for batch in collector:
            rewards.normalize_(batch, world)
            with delayed(batch):
                for part in world.gradients(policy, batch):
                    log_prob = policy.get_dist(part.clone()).log_prob(part["action"])
                    (log_prob * part["next", "reward"].squeeze(-1)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            norm.update(batch, None if forgets else world)
            collector.update_policy_weights_()
            found.append(digest([*policy.state_dict().values(), *rewards.buffers()]))
    return found


def with_shards() -> list[str]:
    with keep_servers():
        found = train(4)
        if int(os.environ["WORLD_SIZE"]) > 1:
            with pytest.raises(WorldError, match=r"give RunningNorm\.update the world"):
                train(None, forgets=True)
    return found


def test_the_number_of_learners_makes_no_difference_to_statistics() -> None:
    outcomes = run_ranks(with_shards, 1) + run_ranks(with_shards, 2)
    assert [outcome.error for outcome in outcomes] == [""] * 3
    alone, first, second = (outcome.result for outcome in outcomes)
    assert first == second == alone
    assert len(set(alone)) == ROUNDS
