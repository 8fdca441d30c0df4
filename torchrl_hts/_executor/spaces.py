"""The spaces of a gymnasium environment, each with a generator of its own.

``space.sample()`` draws from a generator that the space has, which the system's entropy seeds
unless somebody else does. Environments use it for random starts and noops, and what they get must
be the same for the same seed, whoever shares the process (I7).

So a space that several environments share is copied for each. One that is an environment's own
stays where it is, for other objects of that environment may draw from it too.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np

from torchrl_hts._executor.background_env import BackgroundEnv
from torchrl_hts.env_state.attributes import attributes_of, is_a, set_attribute
from torchrl_hts.errors import EnvError

__all__ = ["all_layers", "own_spaces", "seed_spaces"]

_NAMES = ("action_space", "observation_space")
_SPAWN_KEY = 0x73706163  # "spac": sets these seeds apart from others of the same number
_MOST_PARTS = 10_000  # of an attribute, the nearest ones, are looked at

# By its id: a space that an environment of this process holds, and that environment.
_held: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


def own_spaces(env: gym.Env[Any, Any]) -> None:
    """Give an environment and its wrappers copies of the spaces that they share with others.

    Shared are the attributes of their classes, the globals of the modules of these, and what an
    earlier environment of this process holds.

    Raises:
        EnvError: if such a space can't be copied.
    """
    layers = list(all_layers(env))
    base = layers[-1]
    of_classes = _of_classes({cls for layer in layers for cls in type(layer).__mro__})
    shared = {id(part) for space in of_classes for part in _within(space)}
    copies: dict[int, Any] = {id(layer): layer for layer in layers}  # which a space may know

    def is_shared(space: gym.Space[Any]) -> bool:
        return any(id(part) in shared or _is_held(part, base) for part in _within(space))

    for layer in layers:
        of_class = {name: inspect.getattr_static(type(layer), name, None) for name in _NAMES}
        for name, value in {**of_class, **attributes_of(layer)}.items():
            if any(map(is_shared, _spaces_in(value))):
                try:
                    set_attribute(layer, name, _with_copies(value, is_shared, copies))
                except Exception as error:
                    raise EnvError(
                        f"{name} of {type(layer).__name__} is or holds a space that environments "
                        f"share, which can't be copied for each ({type(error).__name__}: {error}): "
                        "make it in the constructor"
                    ) from error
    for layer in layers:
        for value in attributes_of(layer).values():
            for space in _spaces_in(value):
                for part in _within(space):
                    _hold(part, base)


def seed_spaces(env: gym.Env[Any, Any], seed: int) -> None:
    """Seed every space that an environment or one of its wrappers holds.

    As an attribute, or in a list, tuple or dict that is one.
    """
    spaces = {
        id(space): space
        for layer in all_layers(env)
        for value in attributes_of(layer).values()
        for space in _spaces_in(value)
    }
    seeds = np.random.SeedSequence(seed, spawn_key=(_SPAWN_KEY,)).generate_state(len(spaces))
    for space, one in zip(spaces.values(), seeds.tolist(), strict=True):
        space.seed(one)


def _spaces_in(value: Any) -> Iterator[gym.Space[Any]]:
    """A space itself, or those in a plain container, which may hold itself."""
    if is_a(value, gym.Space):
        yield value
    elif type(value) in (list, tuple, dict):
        parts = islice(_parts(value), _MOST_PARTS)
        yield from (part for part in parts if is_a(part, gym.Space))


def _parts(container: Any) -> Iterator[Any]:
    """What containers hold, the nearest first."""
    seen, waiting = {id(container)}, deque([container])
    while waiting:
        container = waiting.popleft()
        for part in container.values() if type(container) is dict else container:
            yield part
            if type(part) in (list, tuple, dict) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def _within(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    """A space and those that it is made up of."""
    seen, waiting = {id(space)}, deque([space])
    while waiting:
        space = waiting.popleft()
        yield space
        for value in vars(space).values():
            for part in _spaces_in(value):
                if id(part) not in seen:
                    seen.add(id(part))
                    waiting.append(part)


def _of_classes(classes: Iterable[type]) -> Iterator[gym.Space[Any]]:
    """The spaces that all objects of some classes share: theirs, and their modules'."""
    modules: dict[int, dict[str, Any]] = {}
    for cls in classes:
        for value in list(vars(cls).values()):
            yield from _spaces_in(value)
            if is_a(value, types.FunctionType):
                modules[id(value.__globals__)] = value.__globals__
    for names in modules.values():
        for value in list(names.values()):
            yield from _spaces_in(value)


def _is_held(space: gym.Space[Any], base: Any) -> bool:
    """Whether an environment with another base, which is still there, holds a space."""
    found = _held.get(id(space))
    if found is None:
        return False
    known, holder = (each() for each in found)
    return known is space and holder is not None and holder is not base


def _hold(space: gym.Space[Any], base: Any) -> None:
    key = id(space)
    _held[key] = weakref.ref(space, lambda _: _held.pop(key, None)), weakref.ref(base)


def _with_copies(
    value: Any, is_shared: Callable[[gym.Space[Any]], bool], copies: dict[int, Any]
) -> Any:
    """The same with copies of what is shared in it; containers of that are new ones.

    Args:
        value: a space or a container.
        is_shared: of a space.
        copies: by id, of what has been met; layers still share what they did.
    """
    if is_a(value, gym.Space):
        return deepcopy(value, copies) if is_shared(value) else value
    if not any(map(is_shared, _spaces_in(value))):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is tuple:
        return tuple(_with_copies(part, is_shared, copies) for part in value)
    made = copies[id(value)] = type(value)()
    if type(value) is dict:
        made.update({k: _with_copies(part, is_shared, copies) for k, part in value.items()})
    else:
        made.extend([_with_copies(part, is_shared, copies) for part in value])
    return made


def all_layers(env: gym.Env[Any, Any]) -> Iterator[gym.Env[Any, Any]]:
    """An environment's wrappers, the outermost first, then what is within them."""
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env
    if isinstance(env, BackgroundEnv) and env.held is not None:
        yield from all_layers(env.held)  # whose spaces it shows
    else:
        yield env
