"""An environment that draws from whatever a process has one of, to check that all is repeatable."""

from __future__ import annotations

import random
from random import gauss
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["DrawingEnv"]


class DrawingEnv(gym.Env[Any, Any]):
    """Observes what it draws at each step; its episodes end at random, too.

    The observation: of Python's generator, of numpy's, of its action space's, and of torch's.

    Args:
        use_torch: whether it imports torch, and when: once it is made, or in its first step. Else
            the last observation is what was drawn while it was made.
        quiet_steps: so many steps of its first episode, which does not end before, draw nothing.
    """

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-10, 10, (4,), np.float32)

    def __init__(self, use_torch: str = "never", quiet_steps: int = 0) -> None:
        self.use_torch, self.quiet_steps = use_torch, quiet_steps
        self.made_with = random.random() + np.random.rand()
        if use_torch == "made":
            self.made_with += self._torchs()
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """An episode; a seed begins the quiet steps anew."""
        super().reset(seed=seed)
        if seed is not None:
            self.steps = 0
        return self._draw(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """A step."""
        self.steps += 1
        return self._draw(), 1.0, self._draws() and random.random() < 0.2, False, {}

    def _draws(self) -> bool:
        return not self.quiet_steps or self.steps > self.quiet_steps

    def _draw(self) -> Any:
        if not self._draws():
            return np.zeros(4, np.float32)
        of_torch = self.made_with if self.use_torch == "never" else self._torchs()
        of_space = float(self.action_space.sample())
        return np.array([gauss(0, 1), np.random.randn(), of_space, of_torch], np.float32)

    def _torchs(self) -> float:
        import torch

        return float(torch.rand(()))
