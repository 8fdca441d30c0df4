"""The small environments of the delay study, and the settings that they are learned with.

Nothing here imports torch, so the executors don't either; nor gymnasium, until an environment is
made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["TASKS", "Settings", "Task"]


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


def _made(env_id: str) -> gym.Env[Any, Any]:
    import gymnasium

    return gymnasium.make(env_id)


def _game(name: str) -> gym.Env[Any, Any]:
    from support.minatar_games import MinAtar

    return MinAtar(name)


def _minatar(title: str, game: str, *, shared_trunk: bool) -> Task:
    return Task(title, partial(_game, game), 150_000, _MINATAR, shared_trunk)


_MINATAR = {
    "a2c": Settings(16, 2e-3, gamma=0.99, gae_lambda=0.95, entropy_coefficient=0.01),
    "ppo": Settings(32, 1e-3, 0.99, 0.95, entropy_coefficient=0.01, epochs=4, minibatches=4),
}

TASKS = {
    "cartpole": Task(
        "CartPole-v1",
        partial(_made, "CartPole-v1"),
        100_000,
        {
            "a2c": Settings(32, 3e-3, gamma=0.98, gae_lambda=0.9),
            "ppo": Settings(32, 1e-3, gamma=0.98, gae_lambda=0.8, epochs=8, minibatches=2),
        },
    ),
    "acrobot": Task(
        "Acrobot-v1",
        partial(_made, "Acrobot-v1"),
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
