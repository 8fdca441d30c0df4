"""Running statistics that an environment normalises with, found in its wrappers.

They are a wrapper's own, begin anew where another environment is made, and so differ between
training and evaluation. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from torchrl_hts._executor.vector_singles import Single

Wrapped = gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]
Wrapper = gym.Wrapper[Any, Any, Any, Any] | gym.vector.VectorWrapper

__all__ = ["normalisation_warnings", "statistics_warnings"]

_OBSERVATIONS = (
    "the Evaluator's environments normalise observations with running statistics of their own "
    "({names}), not with training's: freeze the same statistics in both factories "
    "(update_running_mean = False), or normalise in the policy, with torchrl_hts.RunningNorm "
    "(docs/how_to/normalise.md)"
)
_REWARDS = (
    "the Evaluator's environments normalise rewards ({names}), so its returns are no returns of "
    "the task: leave that wrapper out of the factory that the Evaluator is given, or scale rewards "
    "in the learner, with torchrl_hts.RunningRewardNorm"
)

_REWARD_WRAPPERS = (gym.RewardWrapper, gym.vector.VectorRewardWrapper)
_REWARD = re.compile(r"_*re[tw]")  # return_rms, ret_rms, reward_statistics
# Usual names: gymnasium's, torch's, and those of Welford's method.
_MEANS = {"mean", "mu", "running_mean"}
_VARIANCES = {"M2", "S", "m2", "running_std", "running_var", "s", "sigma", "std", "var", "variance"}
_COUNTS = {"count", "k", "n", "num", "num_batches_tracked", "num_samples", "steps", "t"}


def normalisation_warnings(env: Wrapped) -> list[str]:
    """What evaluations in such an environment, or batch, would get wrong, a sentence each.

    Args:
        env: with its wrappers. Gymnasium's normalising ones are known, those that were derived
            from them, and others that count a mean and a variance, in an object that they have or
            in themselves. Statistics that were loaded and frozen (``update_running_mean`` or
            ``training`` is False) are right.
    """
    observations, rewards = [], []
    for wrapper in _wrappers(env):
        name = type(wrapper).__qualname__
        of_rewards, of_observations = _statistics(wrapper)
        if of_rewards or isinstance(wrapper, gym.wrappers.NormalizeReward):
            rewards.append(name)
        if of_observations and not (
            _is_frozen(wrapper) and not any(_is_untouched(each) for each in of_observations)
        ):
            observations.append(name)
    return statistics_warnings(observations, rewards)


def statistics_warnings(observations: Sequence[str], rewards: Sequence[str] = ()) -> list[str]:
    """What evaluations get wrong by what normalises observations, and rewards, a sentence each."""
    found = ((_OBSERVATIONS, observations), (_REWARDS, rewards))
    return [text.format(names=", ".join(names)) for text, names in found if names]


def _wrappers(env: Wrapped) -> Iterator[Wrapper]:
    """Of an environment, or of a batch and the first environment of a plain one."""
    while isinstance(env, gym.Wrapper | gym.vector.VectorWrapper):
        yield env
        env = env.env
    if isinstance(env, gym.vector.SyncVectorEnv):
        first = env.envs[0]
        yield from _wrappers(first.env if isinstance(first, Single) else first)


def _statistics(wrapper: Wrapper) -> tuple[list[Any], list[Any]]:
    """What a wrapper counts of rewards and of observations."""
    of_rewards: list[Any] = []
    of_observations: list[Any] = []
    for name, value in {"self": wrapper, **vars(wrapper)}.items():
        if value is not wrapper.env and _counts_moments(value):
            is_of_rewards = isinstance(wrapper, _REWARD_WRAPPERS) or _REWARD.match(name)
            (of_rewards if is_of_rewards else of_observations).append(value)
    return of_rewards, of_observations


def _counts_moments(value: Any) -> bool:
    """Whether it has a mean, a variance and a count, each by one of the usual names."""
    names = getattr(value, "__dict__", {}).keys()
    names = {name.lstrip("_") for name in names}
    return bool(names & _MEANS and names & _VARIANCES and names & _COUNTS)


def _is_frozen(wrapper: Wrapper) -> bool:
    return any(
        getattr(wrapper, name, None) is False for name in ("update_running_mean", "training")
    )


def _is_untouched(statistics: Any) -> bool:
    """Whether they are those that a wrapper begins with."""
    mean, variance = getattr(statistics, "mean", None), getattr(statistics, "var", None)
    return bool(variance is not None and not np.any(mean) and np.all(variance == 1))
