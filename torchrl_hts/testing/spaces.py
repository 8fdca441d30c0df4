"""What the spaces of an environment are, in words."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from torchrl.envs import EnvBase

from torchrl_hts._executor.space_texts import of_env
from torchrl_hts._executor.torchrl_env import TorchRLEnvironment
from torchrl_hts._executor.vector_env import VectorEnvironment

__all__ = ["spaces_of"]


def spaces_of(env: Any) -> dict[str, str]:
    """What the spaces of an environment are, in words: to find out whether they have changed.

    A collector says the same of its environments, in `HTSCollector.spaces`.

    Args:
        env: an environment or a batch of them, as ``create_env_fn`` makes them. It is of no further
            use, but for being closed.

    Returns:
        A text for each space and each part of one, by name. There are those of a gymnasium
        environment within its wrappers too.

    Raises:
        TypeError, EnvError: if a collector would refuse it.

    Example:
        >>> env = gym.make("CartPole-v1")
        >>> spaces_of(env)["action space"]
        'Discrete(2, start=0, int64)'
        >>> env.close()
    """
    if isinstance(env, EnvBase):
        return dict(TorchRLEnvironment(env, 0).description.texts)
    if isinstance(env, gym.vector.VectorEnv):
        return dict(VectorEnvironment(env, 0).description.texts)
    return of_env(env)
