"""Each call of a factory makes an environment of its own: one that was made before is refused.

Two rows that step the same environment would hold parts of one episode each, and which parts, the
number of executors would say: each process makes its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import gymnasium as gym
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from torchrl_hts._executor.background_env import BackgroundEnv
from torchrl_hts.errors import EnvError

__all__ = ["check_made_once", "gymnasium_parts"]

# By its id: an environment that a factory has made in this process, and the factory's name.
_made: dict[int, tuple[weakref.ref[Any], str]] = {}


def check_made_once(factory: str, parts: Iterable[Any]) -> None:
    """Remember what a factory has made.

    Args:
        factory: its name, for people.
        parts: the environments of one call, below their wrappers.

    Raises:
        EnvError: if one of them was there already.
    """
    ours: set[int] = set()
    for env in parts:
        found, first = _made.get(id(env), (None, ""))
        if id(env) in ours:
            raise EnvError(
                f"{factory} made a batch that holds one environment twice: make a new one for each "
                "place (no cache)"
            )
        if found is not None and found() is env:
            raise EnvError(
                f"{factory} made the environment that {'it' if first == factory else first} has "
                "made before: make a new one at each call (no cache). One that sets all of its "
                "engine's state at each step may share it, as a gym.Env and no gym.Wrapper"
            )
        ours.add(id(env))
        _made[id(env)] = weakref.ref(env), factory


def gymnasium_parts(env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> Iterator[Any]:
    """What is below the wrappers of an environment or a batch, and of those in it at hand."""
    while isinstance(env, gym.Wrapper | VectorWrapper):
        env = env.env
    if isinstance(env, BackgroundEnv) and env.held is not None:
        yield from gymnasium_parts(env.held)
    yield env
    if isinstance(env, SyncVectorEnv):
        for one in env.envs:
            yield from gymnasium_parts(one)
