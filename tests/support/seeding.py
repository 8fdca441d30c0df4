"""Environments that seed what they draw from with nothing."""

from __future__ import annotations

import multiprocessing
import random
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.seeding import np_random

__all__ = ["Drawing", "Forking", "Late", "Sampling", "Seeding", "Unseeded"]


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


class Unseeded(gym.Env[Any, Any]):
    """Draws before gymnasium's `reset` has seeded it, and from what nobody seeds."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.layout = self.np_random.random()
        self.start = gym.spaces.Box(0, 1, (), np.float32).sample()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.noise = gym.spaces.Box(0, 1, (), np.float32)
        self.own, _ = np_random()
        self.t = 0
        return self._observe(), {}

    def _observe(self) -> Any:
        drawn = self.np_random.random() + self.own.random()
        return np.array([self.layout, self.start, self.noise.sample(), drawn / 2], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._observe(), self.np_random.random(), self.t == 3, False, {}


class Drawing(gym.Env[Any, Any]):
    """Draws from the process's generators, which nobody seeds."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._observe(), {}

    def _observe(self) -> Any:
        return np.array([random.random(), np.random.rand()], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observe(), 0.0, False, False, {}


class Sampling(Drawing):
    """Draws, while it is made, from a space that all of its class share, and then from others."""

    def __init__(self) -> None:
        self.layout = [self.observation_space.sample()[0], np.random.rand()]

    def _observe(self) -> Any:
        return np.array(self.layout, np.float32)


class Late(Drawing):
    """Imports torch in an episode, and draws from it."""

    def _observe(self) -> Any:
        import torch

        return np.array([torch.rand(()).item(), torch.rand(()).item()], np.float32)


def _drawn() -> float:
    return random.random()


class Forking(Drawing):
    """Has two processes that draw."""

    def __init__(self) -> None:
        self.layout = []
        for _ in range(2):
            with multiprocessing.get_context("fork").Pool(1) as pool:
                self.layout.append(pool.apply(_drawn))

    def _observe(self) -> Any:
        return np.array(self.layout, np.float32)
