"""A gymnasium environment by itself that draws as one in a collector or an evaluation does."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.spaces import own_spaces, seed_spaces

__all__ = ["OwnGenerators"]


class OwnGenerators(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that draws the same, step by step, as a `GymEnvironment` of the same seed."""

    def __init__(self, env: gym.Env[Any, Any], generators: Generators) -> None:
        super().__init__(env)
        self._generators = generators
        own_spaces(env)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A new episode, which a seed determines."""
        if seed is not None:
            self._generators.seed(seed)
            seed_spaces(self.env, seed)
        self._generators.enter()
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """A step."""
        self._generators.enter_step()
        return self.env.step(action)
