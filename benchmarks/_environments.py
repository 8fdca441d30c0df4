"""Environments of the benchmarks. Importing this module does not import torch."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["OBSERVATION_SIZE", "CostlessEnv", "SleepEnv"]

OBSERVATION_SIZE = 64
EPISODE_STEPS = 1_000

Observation = np.ndarray[Any, np.dtype[np.float32]]


class CostlessEnv(gym.Env[Observation, int]):
    """Always the same observation of 64 floats, four actions, episodes of 1,000 steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (OBSERVATION_SIZE,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        self._observation = np.zeros(OBSERVATION_SIZE, np.float32)
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode."""
        super().reset(seed=seed)
        self._step = 0
        return self._observation, {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One step that costs nothing."""
        self._step += 1
        return self._observation, 1.0, False, self._step == EPISODE_STEPS, {}


class SleepEnv(CostlessEnv):
    """Sleeps at each step, for times drawn from an exponential distribution.

    Args:
        index: together with ``seed``, what this environment's times are drawn from.
        mean_s: mean time of a step, in seconds.
        seed: the benchmark's seed.
    """

    def __init__(self, index: int, mean_s: float = 0.01, seed: int = 0) -> None:
        super().__init__()
        self._mean_s = mean_s
        self._times = np.random.default_rng([seed, index])

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Sleeps, then steps."""
        time.sleep(self._times.exponential(self._mean_s))
        return super().step(action)
