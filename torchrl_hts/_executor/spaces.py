"""The spaces of a gymnasium environment, each with a generator of its own.

``space.sample()`` draws from a generator that the space has, which the system's entropy seeds
unless somebody else does. Environments use it for random starts and noops, and what they get must
be the same for the same seed, whoever shares the process (I7).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["own_spaces", "seed_spaces"]

_NAMES = ("action_space", "observation_space")
_SPAWN_KEY = 0x73706163  # "spac": sets these seeds apart from others of the same number


def own_spaces(env: gym.Env[Any, Any]) -> None:
    """Give an environment and its wrappers copies of their spaces.

    For those that are attributes of a class, or of a module, all environments of a process share.
    """
    copies: dict[int, Any] = {}  # what layers share they still do
    for layer in _layers(env):
        own = vars(layer)
        of_class = {name: inspect.getattr_static(type(layer), name, None) for name in _NAMES}
        for name, value in {**of_class, **own}.items():
            if next(_spaces_in(value), None) is not None:
                own[name] = _with_own(value, copies)


def seed_spaces(env: gym.Env[Any, Any], seed: int) -> None:
    """Seed every space that an environment or one of its wrappers holds.

    As an attribute, or in a list, tuple or dict that is one.
    """
    spaces = {
        id(space): space
        for layer in _layers(env)
        for value in vars(layer).values()
        for space in _spaces_in(value)
    }
    seeds = np.random.SeedSequence(seed, spawn_key=(_SPAWN_KEY,)).generate_state(len(spaces))
    for space, one in zip(spaces.values(), seeds.tolist(), strict=True):
        space.seed(one)


def _spaces_in(value: Any, seen: set[int] | None = None) -> Iterator[gym.Space[Any]]:
    """A space itself, or those in a plain container.

    Args:
        value: to look into.
        seen: ids of the containers that have been looked into; they may hold each other.
    """
    if isinstance(value, gym.Space):
        yield value
    elif type(value) in (list, tuple, dict):
        seen = set() if seen is None else seen
        if id(value) in seen:
            return
        seen.add(id(value))
        for part in value.values() if isinstance(value, dict) else value:
            yield from _spaces_in(part, seen)


def _with_own(value: Any, copies: dict[int, Any]) -> Any:
    """The same with copies of its spaces; containers are new ones, since others may hold them."""
    if isinstance(value, gym.Space):
        return deepcopy(value, copies)
    if type(value) in (list, tuple):
        return type(value)(_with_own(part, copies) for part in value)
    if type(value) is dict:
        return {key: _with_own(part, copies) for key, part in value.items()}
    return value


def _layers(env: gym.Env[Any, Any]) -> Iterator[gym.Env[Any, Any]]:
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env
    yield env
