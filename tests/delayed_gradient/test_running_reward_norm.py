"""RunningRewardNorm: gymnasium's numbers, episode by episode, over batches and over parts."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_hts import RunningRewardNorm, World

pytestmark = pytest.mark.usefixtures("seeded_thread")


def batch_of(rewards: Tensor, terminated: Tensor) -> TensorDict:
    """Of rewards ``[N, T]``."""
    step = {"reward": rewards.unsqueeze(-1).clone(), "terminated": terminated.unsqueeze(-1)}
    return TensorDict({"next": TensorDict(step, rewards.shape)}, rewards.shape)


def rounds(num_envs: int, count: int = 3, steps: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(num_envs, steps, generator=generator) * (j + 1) + 1,
            torch.rand(num_envs, steps, generator=generator) < 0.1,
        )
        for j in range(count)
    ]


def returns_of(rewards: list[float], terminated: list[bool], gamma: float) -> list[float]:
    """R after each step of one environment, as in the formula."""
    found, now = [], 0.0
    for reward, ends in zip(rewards, terminated, strict=True):
        now = gamma * now * (1 - ends) + reward
        found.append(now)
    return found


def test_rewards_are_divided_by_the_deviation_of_all_returns_until_then() -> None:
    norm = RunningRewardNorm(4, gamma=0.9, clip=1.5)
    seen: list[tuple[Tensor, Tensor]] = []
    for rewards, terminated in rounds(4):
        seen.append((rewards, terminated))
        batch = batch_of(rewards, terminated)
        norm.normalize_(batch)
        rows = [torch.cat(each, 1).tolist() for each in zip(*seen, strict=True)]
        returns = [returns_of(r, t, 0.9) for r, t in zip(*rows, strict=True)]
        np.testing.assert_allclose(float(norm.var), np.var(returns), rtol=1e-9)
        np.testing.assert_allclose(norm.returns.numpy(), [row[-1] for row in returns], rtol=1e-12)
        expected = (rewards / (np.var(returns) + 1e-8) ** 0.5).clamp(-1.5, 1.5)
        torch.testing.assert_close(batch["next", "reward"].squeeze(-1), expected)


class Rewards(gym.Env[Any, Any]):
    """Gives the rewards of a list, with episodes that end."""

    observation_space = action_space = gym.spaces.Discrete(2)

    def __init__(self, rewards: list[float], terminated: list[bool]) -> None:
        self.steps = iter(zip(rewards, terminated, strict=True))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, ends = next(self.steps)
        return 0, reward, ends, False, {}


def test_the_statistics_are_those_of_gymnasiums_wrapper() -> None:
    ((rewards, terminated),) = rounds(1, count=1, steps=400)
    env = gym.wrappers.NormalizeReward(Rewards(rewards[0].tolist(), terminated[0].tolist()), 0.99)
    env.reset()
    for ends in terminated[0]:
        env.step(0)
        if ends:
            env.reset()
    norm = RunningRewardNorm(1)
    norm.normalize_(batch_of(rewards, terminated))
    np.testing.assert_allclose(norm.returns.item(), env.discounted_reward.item(), rtol=1e-12)
    np.testing.assert_allclose(
        norm.var.item(), env.return_rms.var, rtol=1e-5
    )  # it counts 1e-4 more


def test_parts_and_batches_give_the_same_bits_and_the_state_goes_on() -> None:
    whole, parts, resumed = (RunningRewardNorm(8) for _ in range(3))
    threads = torch.get_num_threads()
    with World(shards=4) as world:
        for rewards, terminated in rounds(8):
            one = batch_of(rewards, terminated)
            whole.normalize_(one, world)
            cut = world.parts(batch_of(rewards, terminated))
            parts.normalize_(cut, world)
            assert torch.equal(torch.cat(cut)["next", "reward"], one["next", "reward"])
            resumed.load_state_dict(whole.state_dict())
    torch.set_num_threads(threads)
    for norm in (parts, resumed):
        assert all(map(torch.equal, norm.buffers(), whole.buffers()))


ONES = torch.ones(2, 3)
NO = torch.zeros(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RunningRewardNorm(0), "num_envs must be at least 1"),
        (lambda: RunningRewardNorm(1, gamma=1.5), "gamma must be between 0 and 1, got 1.5"),
        (lambda: RunningRewardNorm(1, gamma="x"), "gamma must be a number, got 'x'"),
        (lambda: RunningRewardNorm(1, eps=-1), "eps must be positive"),
        (lambda: RunningRewardNorm(1).normalize_(None), "expected a batch, .* got NoneType"),
        (
            lambda: RunningRewardNorm(4).normalize_(batch_of(ONES, NO)),
            "expected a batch of 4 environments, got 2: num_envs is the number of all learners'",
        ),
        (
            lambda: RunningRewardNorm(2).normalize_(batch_of(ONES * torch.inf, NO)),
            "rewards can't be counted: some are infinite",
        ),
        (
            lambda: RunningRewardNorm(2).normalize_(
                batch_of(ONES, NO).set("collector", TensorDict({"mask": ~NO}, [2, 3]))
            ),
            "before it is split into trajectories",
        ),
        (
            lambda: RunningRewardNorm(2).normalize_(batch_of(ONES.long(), NO)),
            "must be floats, got torch.int64",
        ),
        (
            lambda: RunningRewardNorm(6).normalize_(batch_of(ONES, NO).reshape(-1)),
            r"one reward for each of the steps \(6,\) of a batch \[N, T\]",
        ),
    ],
)
def test_bad_input_is_one_sentence(make, said) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make()
