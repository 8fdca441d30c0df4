"""MinAtar's games as environments whose episodes depend on their seeds alone."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["MinAtar"]


class MinAtar(gym.Env[np.ndarray, np.int64]):
    """A game of MinAtar (Young and Tian 2019), with sticky actions and the actions that it uses.

    The package's own gymnasium class doesn't forget the last action, which a sticky step repeats,
    where an episode ends: what follows a reset then doesn't depend on its seed alone.

    Args:
        game: ``"breakout"``, ``"space_invaders"``, ...: a module of `minatar.environments`.
    """

    def __init__(self, game: str) -> None:
        try:
            from minatar import Environment  # an optional package, and slow to import
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "MinAtar's games need the package minatar, which is not installed: "
                "pip install 'torchrl_hts[minatar]'",
                name=error.name,
            ) from error

        self._game = Environment(game)
        self._actions = self._game.minimal_action_set()
        self.action_space = gym.spaces.Discrete(len(self._actions))
        self.observation_space = gym.spaces.Box(0, 1, tuple(self._game.state_shape()), np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._game.seed(seed)
        self._game.last_action = 0
        self._game.reset()
        return self._game.state(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, terminated = self._game.act(self._actions[action])
        return self._game.state(), float(reward), terminated, False, {}
