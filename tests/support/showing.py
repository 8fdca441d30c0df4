"""Environments of six steps that show what a test says, and whose spaces don't tell all of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

spaces = gym.spaces


class Shows(gym.Env[Any, Any]):
    """Six steps, an observation of some space as a function of the environment, four actions.

    It counts its episodes, and knows which actions are legal.
    """

    def __init__(
        self, space: gym.Space[Any], show: Callable[[Any], Any], unsaved: bool = False
    ) -> None:
        self.observation_space, self.show = space, show
        self.action_space = spaces.Discrete(4)
        self.episodes = 0
        self.lock = threading.Lock() if unsaved else None

    def _observe(self) -> Any:
        self.legal = np.zeros(4, bool)
        self.legal[self.np_random.permutation(4)[:2]] = True
        return self.show(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.episodes += 1
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._observe(), float(self.legal[action]), self.t == 6, False, {}


def show_episodes(env: Any) -> Any:
    """How many episodes there have been."""
    return np.full(2, env.episodes, np.float32)


def show_draws(env: Any) -> Any:
    """A number of its own generator, and one of Python's."""
    return np.array([env.np_random.random(), random.random()], np.float32)


def floats(*shape: int) -> spaces.Box:
    """A space of any numbers."""
    return spaces.Box(-np.inf, np.inf, shape, np.float32)
