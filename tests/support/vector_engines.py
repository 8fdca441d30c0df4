"""Engines of batches of environments that tests look into."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class Counting(VectorEnv[Any, Any, Any]):
    """An engine of arrays: what an environment observes is its seed and the steps since its reset.

    Args:
        mode: how it begins new episodes.
        takes_seeds: whether it takes one for each.
    """

    def __init__(self, mode: AutoresetMode, *, takes_seeds: bool = True, k: int = 2) -> None:
        self.num_envs = k
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = Box(-1, np.inf, (2,), np.float64)
        self.single_action_space = Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, k)
        self.action_space = batch_space(self.single_action_space, k)
        self.takes_seeds = takes_seeds
        self.rewards: Any = np.zeros(k)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if not self.takes_seeds:
            super().reset(seed=seed)
        self.current = np.zeros((self.num_envs, 2))
        self.current[:, 0] = -1 if seed is None else seed
        return self.current.copy(), {}

    def step(self, actions: Any) -> Any:
        self.current[:, 1] += 1
        ended = self.current[:, 1] >= 3
        infos: dict[str, Any] = {"final_obs": self.current.copy()} if ended.any() else {}
        self.current[ended, 1] = 0
        return self.current.copy(), self.rewards, ended, np.zeros(self.num_envs, bool), infos


class WithMask(Counting):
    """The same, which begins what it is told to."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options and "reset_mask" in options:
            self.current[options["reset_mask"], 1] = 0
            return self.current.copy(), {}
        return super().reset(seed=seed)

    def step(self, actions: Any) -> Any:
        self.current[:, 1] += 1
        ended = self.current[:, 1] >= 3
        return self.current.copy(), self.rewards, ended, np.zeros(self.num_envs, bool), {}
