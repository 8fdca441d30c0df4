"""Environments of the benchmarks. Importing this module does not import torch."""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

__all__ = [
    "OBSERVATION_SIZE",
    "SLEEP_MEAN_S",
    "STRAGGLER_FACTOR",
    "VARIATIONS",
    "CostlessBatch",
    "CostlessEnv",
    "RecordedEnv",
    "SleepEnv",
    "StepTimes",
]

OBSERVATION_SIZE = 64
EPISODE_STEPS = 1_000
SLEEP_MEAN_S = 0.01
STRAGGLER_FACTOR = 5  # how much longer the one slow environment sleeps
LOGNORMAL_SIGMA = 1.5
GAMMA_SHAPE = 4

Observation = np.ndarray[Any, np.dtype[np.float32]]
StepTimes = Literal["constant", "gamma", "exponential", "lognormal", "straggler"]

# The standard deviation of a step's time over its mean.
VARIATIONS: dict[StepTimes, float] = {
    "constant": 0.0,
    "gamma": GAMMA_SHAPE**-0.5,
    "exponential": 1.0,
    "lognormal": math.expm1(LOGNORMAL_SIGMA**2) ** 0.5,
}


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


class CostlessBatch(VectorEnv[Any, Any, Any]):
    """The same environments as one batch of arrays.

    Args:
        num_envs: k.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = CostlessEnv.observation_space
        self.single_action_space = CostlessEnv.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._observations = np.zeros((num_envs, OBSERVATION_SIZE), np.float32)
        self._rewards = np.ones(num_envs, np.float32)
        self._never = np.zeros(num_envs, bool)
        self._steps = np.zeros(num_envs, np.int64)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Starts an episode in each."""
        self._steps[:] = 0
        return self._observations, {}

    def step(self, actions: Any) -> Any:
        """One step of each that costs nothing."""
        self._steps += 1
        ended = self._steps == EPISODE_STEPS
        infos = {}
        if ended.any():
            self._steps[ended] = 0
            infos["final_obs"] = self._observations
        return self._observations, self._rewards, self._never, ended, infos


class SleepEnv(CostlessEnv):
    """Sleeps at each step, by default for 10 ms on average.

    Args:
        index: together with ``seed``, what this environment's times are drawn from.
        times: their distribution (see `VARIATIONS`). ``"lognormal"`` has a heavy tail; with
            ``"straggler"``, times are exponential, and those of environment 0 five times as long.
        mean_s: mean time of a step, in seconds.
        seed: the benchmark's seed.
    """

    def __init__(
        self,
        index: int,
        times: StepTimes = "exponential",
        mean_s: float = SLEEP_MEAN_S,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._times = times
        self._random = np.random.default_rng([seed, index])
        self._mean_s = mean_s
        if times == "straggler" and index == 0:
            self._mean_s *= STRAGGLER_FACTOR

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Sleeps, then steps."""
        time.sleep(self.draw_s())
        return super().step(action)

    def draw_s(self) -> float:
        """How long the next step takes, in seconds."""
        return self._mean_s * self._relative()

    def _relative(self) -> float:
        if self._times == "constant":
            return 1.0
        if self._times == "gamma":
            return float(self._random.gamma(GAMMA_SHAPE, 1 / GAMMA_SHAPE))
        if self._times == "lognormal":
            return float(self._random.lognormal(-(LOGNORMAL_SIGMA**2) / 2, LOGNORMAL_SIGMA))
        return float(self._random.exponential())


class RecordedEnv(CostlessEnv):
    """Sleeps for given times, one after the other, in one episode without end; begins again where
    they end.

    Args:
        times_s: of each step, in seconds.
    """

    def __init__(self, times_s: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        super().__init__()
        self._times_s = times_s.tolist()
        self._slept = 0

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Sleeps, then steps."""
        time.sleep(self._times_s[self._slept % len(self._times_s)])
        self._slept += 1
        return self._observation, 1.0, False, False, {}
