"""The small environments of the delay study, and the settings that they are learned with.

Nothing here imports torch, so the executors don't either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["TASKS", "MinAtar", "Settings", "Task"]


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


@dataclass(frozen=True)
class Settings:
    """How an algorithm learns an environment.

    Attributes:
        sync_interval: steps per environment and round (alpha).
        learning_rate: at the start; it decays linearly to 0.
        epochs, minibatches: passes over each batch, and optimizer steps of each pass.
    """

    sync_interval: int
    learning_rate: float
    gamma: float
    gae_lambda: float
    entropy_coefficient: float = 0.0
    epochs: int = 1
    minibatches: int = 1
    num_envs: int = 16


@dataclass(frozen=True)
class Task:
    """An environment of the study, and how each algorithm learns it without lag.

    Attributes:
        title: its name in pictures and tables.
        make_env: makes one.
        total_frames: environment steps of a run.
        settings: by algorithm.
        shared_trunk: whether actor and critic share all layers but the last.
    """

    title: str
    make_env: Callable[[], gym.Env[Any, Any]]
    total_frames: int
    settings: Mapping[str, Settings]
    shared_trunk: bool = False


def _minatar(title: str, game: str, *, shared_trunk: bool) -> Task:
    return Task(title, partial(MinAtar, game), 150_000, _MINATAR, shared_trunk)


_MINATAR = {
    "a2c": Settings(16, 2e-3, gamma=0.99, gae_lambda=0.95, entropy_coefficient=0.01),
    "ppo": Settings(32, 1e-3, 0.99, 0.95, entropy_coefficient=0.01, epochs=4, minibatches=4),
}

TASKS = {
    "cartpole": Task(
        "CartPole-v1",
        partial(gym.make, "CartPole-v1"),
        100_000,
        {
            "a2c": Settings(32, 3e-3, gamma=0.98, gae_lambda=0.9),
            "ppo": Settings(32, 1e-3, gamma=0.98, gae_lambda=0.8, epochs=8, minibatches=2),
        },
    ),
    "acrobot": Task(
        "Acrobot-v1",
        partial(gym.make, "Acrobot-v1"),
        100_000,
        {
            "a2c": Settings(8, 1e-3, gamma=0.99, gae_lambda=0.95),
            "ppo": Settings(64, 1e-3, gamma=0.99, gae_lambda=0.94, epochs=4, minibatches=4),
        },
    ),
    "breakout": _minatar("MinAtar Breakout", "breakout", shared_trunk=False),
    "space_invaders": _minatar("MinAtar Space Invaders", "space_invaders", shared_trunk=False),
    "breakout_shared": _minatar("MinAtar Breakout, shared trunk", "breakout", shared_trunk=True),
    "space_invaders_shared": _minatar(
        "MinAtar Space Invaders, shared trunk", "space_invaders", shared_trunk=True
    ),
}
