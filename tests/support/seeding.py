"""An environment that seeds the global generators with what it is given, mostly nothing."""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["Seeding"]


class Seeding(gym.Env[Any, Any]):
    """As many write it: seeds what it draws from with what `reset` is given, mostly None."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        random.seed(a=seed)
        np.random.seed(seed)
        self.t = 0
        return self._observe(), {}

    def _observe(self) -> Any:
        return np.array([random.random(), np.random.rand()], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._observe(), float(np.random.rand()), self.t == 3, False, {}
