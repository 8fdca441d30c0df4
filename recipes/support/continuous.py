"""Environments with continuous actions, as their literature plays them. Nothing here imports torch.

Executors make them, and they need no torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from support.errors import RecipeError

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["make_bounded", "make_continuous"]


def make_continuous(env_id: str, **options: Any) -> gym.Env[Any, Any]:
    """An environment whose actions are cut to their bounds, and whose observations are vectors.

    Args:
        env_id: gymnasium's id.
        options: of `gymnasium.make`, such as ``render_mode``.

    Raises:
        RecipeError: if its actions are others, or it needs what is not installed.
        gymnasium.error.Error: if there is no such environment.
    """
    import gymnasium as gym  # not at the top: options are parsed, and refused, without it

    return gym.wrappers.ClipAction(_make(env_id, options))


def make_bounded(env_id: str, **options: Any) -> gym.Env[Any, Any]:
    """An environment whose actions keep their bounds, and whose observations are float32 vectors.

    Args:
        env_id, options: see `make_continuous`.

    Raises:
        RecipeError: see `make_continuous`; also if its actions have no bounds.
        gymnasium.error.Error: if there is no such environment.
    """
    import gymnasium as gym
    import numpy as np

    env = _make(env_id, options)
    if not env.action_space.is_bounded("both"):
        raise RecipeError(
            f"this recipe draws actions between their bounds, and those of {env_id} have none "
            f"({env.action_space}): ppo_mujoco.py needs none"
        )
    return gym.wrappers.DtypeObservation(env, np.float32)


def _make(env_id: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    """An environment with continuous actions, whose observations are vectors."""
    import gymnasium as gym

    try:
        env = gym.make(env_id, **options)
    except gym.error.DependencyNotInstalled as error:
        raise RecipeError(f"{env_id} can't be made here: {_advice(str(error))}") from error
    except ImportError as error:  # so does gymnasium say that a version has moved elsewhere
        raise RecipeError(f"{env_id} can't be made: {error}") from error
    action, observation = env.action_space, env.observation_space
    if not isinstance(action, gym.spaces.Box) or len(action.shape) != 1:
        raise RecipeError(
            f"this recipe plays environments with continuous actions (Box, one dimension); those "
            f"of {env_id} are {action}: ppo_cartpole.py plays Discrete ones"
        )
    if not isinstance(observation, gym.spaces.Box) or len(observation.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return env


def _advice(said: str) -> str:
    """What gymnasium says is missing, with the extra that has it where that is one of ours."""
    if "mujoco" in said.lower() and find_spec("mujoco") is None:
        return "MuJoCo is not installed: pip install 'torchrl_hts[mujoco]'"
    return said
