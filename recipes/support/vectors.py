"""Environments that are observed as vectors: which ones a recipe plays, and some entries hidden.

Nothing here imports torch, so the executors don't either.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from support.errors import RecipeError

__all__ = ["check_spaces", "make_partly_hidden"]


def check_spaces(env: gym.Env[Any, Any]) -> None:
    """Refuse an environment that an agent of vectors and discrete actions can't play.

    Raises:
        RecipeError: says what its spaces are.
    """
    if not isinstance(env.action_space, gym.spaces.Discrete):
        is_box = isinstance(env.action_space, gym.spaces.Box) and len(env.action_space.shape) == 1
        continuous = ": ppo_mujoco.py plays continuous ones" if is_box else ""
        raise RecipeError(
            f"this recipe plays environments with Discrete actions; those of {env.spec.id} are "
            f"{env.action_space}{continuous}"
        )
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        raise RecipeError(
            "this recipe plays environments that are observed as vectors (Box, one "
            f"dimension); those of {env.spec.id} give {space}"
        )


def make_partly_hidden(env_id: str, hidden: str, **kwargs: Any) -> gym.Env[Any, Any]:
    """Make an environment whose observations lack some entries.

    Args:
        env_id: of gymnasium.
        hidden: the entries, such as ``"1,3"``; ``""`` hides none.
        kwargs: of ``gymnasium.make``.

    Raises:
        RecipeError: if there are no such entries, or nothing would be left to see.
    """
    env = gym.make(env_id, **kwargs)
    check_spaces(env)
    space = env.observation_space
    entries = range(space.shape[0])
    names = [name.strip() for name in hidden.split(",") if name.strip()]
    kept = [entry for entry in entries if str(entry) not in names]
    if not set(names) <= set(map(str, entries)) or not kept:
        raise RecipeError(
            f"--hide {hidden!r} must name some of the entries 0 to {entries[-1]} that observations "
            f"of {env_id} have, such as 1,3, but not all"
        )
    seen = gym.spaces.Box(space.low[kept], space.high[kept], dtype=space.dtype.type)
    return gym.wrappers.TransformObservation(env, lambda observation: observation[kept], seen)
