"""Environments that normalise by themselves: the Evaluator warns, and its advice works."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from evaluating import one
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TransformObservation
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor

from torchrl_hts import HTSCollector, RunningNorm
from torchrl_hts._evaluation.running_statistics import normalisation_warnings

pytestmark = pytest.mark.usefixtures("nothing_left")


class Context(gym.Env[Any, Any]):
    """Observes -2 or -10 for an episode; the right action, in each of 5 steps, depends on which."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.high = 0, int(self.np_random.integers(2))
        return self._observe(), {}

    def _observe(self) -> np.ndarray:
        return np.array([-2.0 if self.high else -10.0], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._observe(), float(action == self.high), self.t == 5, False, {}


class Derived(NormalizeObservation):
    """As users derive one."""


class Welford(gym.ObservationWrapper[Any, Any, Any]):
    """As users write one."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.n, self.mean, self.M2 = 0, 0.0, 0.0

    def observation(self, observation: Any) -> Any:
        self.n += 1
        difference = observation - self.mean
        self.mean = self.mean + difference / self.n
        self.M2 = self.M2 + difference * (observation - self.mean)
        return (difference / np.sqrt(self.M2 / self.n + 1e-8)).astype(np.float32)


class Torchs(gym.ObservationWrapper[Any, Any, Any]):
    """With torch's names."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.running_mean, self.running_var, self.count = np.zeros(1), np.ones(1), 0

    def observation(self, observation: Any) -> Any:
        return observation


class Short(gym.ObservationWrapper[Any, Any, Any]):
    """With those of a formula."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.mu, self.m2, self.n = 0.0, 0.0, 0

    def observation(self, observation: Any) -> Any:
        return observation


class Moments:
    """Not gymnasium's."""

    def __init__(self) -> None:
        self.mean, self.var, self.count = np.zeros(1), np.ones(1), 1e-4


class Filter(gym.ObservationWrapper[Any, Any, Any]):
    """With its statistics in an object beside it."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.rs = Moments()

    def observation(self, observation: Any) -> Any:
        return observation


class ScaledReward(gym.Wrapper[Any, Any, Any, Any]):
    """With statistics of returns."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.ret_rms = Moments()


class Fixed(gym.ObservationWrapper[Any, Any, Any]):
    """Normalises by what it was given."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.mean, self.std = -6.0, 4.0

    def observation(self, observation: Any) -> Any:
        return (observation - self.mean) / self.std


def frozen(*, loaded: bool) -> gym.Env[Any, Any]:
    """With what training has observed, or without."""
    env = NormalizeObservation(Context())
    if loaded:
        env.obs_rms.mean, env.obs_rms.var = np.array([-6.0]), np.array([16.0])
    env.update_running_mean = False
    return env


@pytest.mark.parametrize("wrapper", [NormalizeObservation, Derived, Welford, Filter, Torchs, Short])
def test_observations_with_statistics_of_their_own(wrapper: Any) -> None:
    for env in (wrapper(Context()), gym.wrappers.TimeLimit(wrapper(Context()), 3)):
        (said,) = normalisation_warnings(env)
        assert "normalise observations" in said
        assert "torchrl_hts.RunningNorm" in said
        assert wrapper.__name__ in said


def test_statistics_that_were_frozen_before_they_had_seen_anything() -> None:
    assert len(normalisation_warnings(frozen(loaded=False))) == 1


@pytest.mark.parametrize("wrapper", [NormalizeReward, ScaledReward])
def test_rewards_that_are_normalised(wrapper: Any) -> None:
    (said,) = normalisation_warnings(wrapper(Context()))
    assert "normalise rewards" in said
    assert "torchrl_hts.RunningRewardNorm" in said
    assert wrapper.__name__ in said
    both = normalisation_warnings(wrapper(NormalizeObservation(Context())))
    assert len(both) == 2


@pytest.mark.parametrize(
    "make",
    [
        Context,
        functools.partial(gym.make, "CartPole-v1"),
        functools.partial(frozen, loaded=True),
        lambda: Fixed(Context()),
        lambda: TransformObservation(Context(), lambda x: (x + 6) / 4, None),
        lambda: gym.wrappers.RecordEpisodeStatistics(Context()),
    ],
)
def test_nothing_is_said_of_others(make: Callable[[], Any]) -> None:
    assert normalisation_warnings(make()) == []


class Sign(nn.Module):
    """Right where the observation is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(50.0))

    def forward(self, observation: Tensor) -> Tensor:
        return torch.cat([-self.slope * observation, self.slope * observation], -1)


def actor(*before: TensorDictModule) -> TensorDictSequential:
    """Plays Context, after what normalises."""
    read = before[-1].out_keys if before else ["observation"]
    return ProbabilisticActor(
        TensorDictSequential(*before, TensorDictModule(Sign(), read, ["logits"])),
        ["logits"],
        distribution_class=torch.distributions.Categorical,
    )


def train(
    make: Callable[[], Any], policy: nn.Module, normalise: RunningNorm | None = None
) -> float:
    """Mean reward of the last of three rounds."""
    with HTSCollector([make] * 2, policy, frames_per_batch=200, total_frames=600, seed=0) as data:
        for batch in data:
            if normalise is not None:
                normalise.update(batch)
    return float(batch["next", "reward"].mean())


def test_the_evaluator_warns_once_for_all_episodes() -> None:
    with pytest.warns(RuntimeWarning) as said:
        result = one(lambda: NormalizeObservation(Context()), actor(), num_episodes=20)
    assert len([each for each in said if "NormalizeObservation" in str(each.message)]) == 1
    assert said[0].filename == one.__code__.co_filename
    assert result.mean < 4.5  # which is why


@pytest.mark.filterwarnings("error")
def test_statistics_in_the_policy_are_those_of_training() -> None:
    normalise = RunningNorm(1)
    policy = actor(TensorDictModule(normalise, ["observation"], ["normalised"]))
    assert train(Context, policy, normalise) == 1.0
    assert one(Context, policy, num_episodes=20).mean == 5.0


@pytest.mark.filterwarnings("error")
def test_frozen_statistics_are_those_of_training() -> None:
    make, policy = functools.partial(frozen, loaded=True), actor()
    assert train(make, policy) == 1.0
    assert one(make, policy, num_episodes=20).mean == 5.0


def test_without_the_wrapper_returns_are_the_tasks() -> None:
    make = functools.partial(frozen, loaded=True)
    with pytest.warns(RuntimeWarning, match="normalise rewards"):
        scaled = one(lambda: NormalizeReward(make()), actor(), num_episodes=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one(make, actor(), num_episodes=5).mean == 5.0 != scaled.mean
