"""The layers of an environment: what their attributes hold, saved and restored."""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import json
import types
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from torchrl_hts.env_state.attributes import is_a
from torchrl_hts.env_state.engines import (
    describe_engine,
    is_engine,
    kept,
    restore_engine,
    save_engine,
)
from torchrl_hts.env_state.functions import (
    code_digest,
    contents,
    function_state,
    globals_of,
    importable,
    restore,
)
from torchrl_hts.env_state.names import Names
from torchrl_hts.env_state.pickles import NameFinder, StateReader, StateSaver
from torchrl_hts.env_state.sealed import opened, sealed
from torchrl_hts.errors import CannotSaveError

__all__ = ["CannotSaveError", "names_of", "restore_environment", "save_environment"]

Where = tuple[int | str, ...]  # the index of a layer, an attribute of it, a cell, ...

_MAGIC = b"torchrl_hts environment 3\n"

# Set when an environment is made, and never after.
_CONSTANTS = frozenset(
    ("_ezpickle_args", "_ezpickle_kwargs", "_saved_kwargs", "spec", "_cached_spec")
)
# What gymnasium.Env itself keeps in an environment.
_GYMNASIUM = ("_np_random", "_np_random_seed", "action_space", "observation_space")

# What can't change may be shared by the base and its wrappers.
_ATOMS = (
    *(int, float, complex, str, bytes, tuple, frozenset, range, enum.Enum, np.dtype, np.generic),
    *(type, types.FunctionType, types.ModuleType),
)


def names_of(env: gym.Env[Any, Any]) -> Names:
    """What the states of an environment may name; to be asked for when the environment is new.

    Args:
        env: the environment, before its first reset.

    Raises:
        TypeError: if it is no `gymnasium.Env`.
    """
    layers = _layers(env)
    fixtures = _fixtures(layers)
    finder = NameFinder(io.BytesIO(), fixtures, None)
    parts = [value for layer in layers for value in _attributes(layer).values()]
    for part in (*parts, *(function_state(function) for _, function in _functions(fixtures))):
        with contextlib.suppress(Exception):  # it can't be saved, which is said when it is to be
            finder.dump(part)
    return Names(map(type, layers), finder.named, _description(layers, fixtures))


def save_environment(
    env: gym.Env[Any, Any], extra: object = None, *, names: Names | None = None
) -> bytes:
    """The state of an environment, between any two calls of its methods.

    Args:
        env: the environment; goes on as if it had not been saved.
        extra: saved along; may share objects with the environment.
        names: from `names_of` when it was new, which is when it will be restored too; by default
            what it names now.

    Raises:
        CannotSaveError: a part of the environment can't be saved for sure; says which, and why.

    >>> first, second = gym.make("CartPole-v1"), gym.make("CartPole-v1")
    >>> observation, _ = first.reset(seed=0)
    >>> state = save_environment(first, extra=observation)
    >>> bool((restore_environment(second, state) == observation).all())
    True
    >>> bool((first.step(0)[0] == second.step(0)[0]).all())
    True
    """
    layers = _layers(env)
    for layer in layers:
        if type(layer).__basicsize__ != gym.Env.__basicsize__:
            raise CannotSaveError(
                f"{_name(layer)} keeps state outside of its __dict__, in __slots__ or in a class "
                f"of C, which can't be saved. {_REMEDY}"
            )
    fixtures = _fixtures(layers)
    description = _description(layers, fixtures)
    names = names or names_of(env)
    _check_makeup(names.makeup, description)
    base = layers[-1]
    stream = io.BytesIO()
    saver = StateSaver(stream, fixtures, names)
    by_protocol = _has_protocol(base) and not _can_be_pickled(base, fixtures, names)
    if by_protocol:
        saver.private = {
            id(value): name
            for name, value in vars(base).items()
            if name not in _GYMNASIUM and value is not None and id(value) not in saver.fixtures
            if not is_a(value, _ATOMS)
        }
    written = []
    for layer in layers[:-1]:
        written.append(_save_parts(saver, _name(layer), _attributes(layer)))
    for where, function in _functions(fixtures):
        _save_parts(
            saver,
            f"function {function.__qualname__} of {_name(layers[int(where[0])])}",
            {"closure and defaults": function_state(function)},
        )
    saver.private = {}
    parts = _protocol_parts(base) if by_protocol else _attributes(base)
    written.append(_save_parts(saver, _name(base), parts))
    for where, engine in _engines(fixtures):
        layer = layers[int(where[0])]
        try:
            state = save_engine(engine, layer)
        except CannotSaveError as error:
            raise CannotSaveError(f"{_name(layer)}: {error}") from error
        _save_parts(saver, _name(layer), {where[1]: state})
    _save_parts(saver, "what was given to be saved along", {"extra": extra})
    head = json.dumps({"chain": description, "names": written}).encode()
    body = head + b"\n" + stream.getvalue()
    return sealed(_MAGIC, body)


def restore_environment(env: gym.Env[Any, Any], state: bytes, *, names: Names | None = None) -> Any:
    """Put an environment into a saved state; returns what was saved along.

    A state runs no code that comes with it: see `torchrl_hts.env_state.names`.

    Args:
        env: made by the factory that made the saved one.
        state: from `save_environment`.
        names: what it may name; by default, what the environment as it is now has.

    Raises:
        TypeError: if it is no `gymnasium.Env`, or the state is no bytes.
        ValueError: the state is damaged, or that of an environment of another make, or names
            something that it may not.
    """
    body = opened(_MAGIC, state, "save_environment")
    head, _, stream = body.partition(b"\n")
    saved = json.loads(head)
    layers = _layers(env)
    fixtures = _fixtures(layers)
    _compare(saved["chain"], _description(layers, fixtures))
    loader = StateReader(io.BytesIO(stream), names or names_of(env), fixtures)
    *wrappers, last = saved["names"]
    try:  # all is read before anything is changed
        parts = [{name: loader.load() for name in names} for names in wrappers]
        closures = [loader.load() for _ in _functions(fixtures)]
        parts.append({name: loader.load() for name in last})
        engines = [loader.load() for _ in _engines(fixtures)]
        extra = loader.load()
    except Exception as error:
        raise ValueError(
            f"the environment's state can't be read here: {error}. Restore it with the code and "
            "the package versions that saved it"
        ) from error
    for (_, engine), one in zip(_engines(fixtures), engines, strict=True):
        restore_engine(engine, one)
    for (_, function), one in zip(_functions(fixtures), closures, strict=True):
        restore(function, one)
    for layer, values in zip(layers, parts, strict=True):
        own = vars(layer)
        if "get_state()" in values:
            layer.set_state(values.pop("get_state()"))  # type: ignore[attr-defined]
        else:
            constants = {name: own[name] for name in own.keys() & _CONSTANTS}
            own.clear()
            own.update(constants)
        own.update(values)
    return extra


_REMEDY = (
    "If the environment is yours, keep its state in what pickle saves whole, or define "
    "get_state() and set_state(state) in the base environment (see torchrl_hts.env_state)"
)


def _save_parts(saver: StateSaver, owner: str, parts: dict[Any, object]) -> list[str]:
    """Write each part of a layer or a function; returns their names."""
    for name, value in parts.items():
        try:
            saver.dump(value)
        except Exception as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CannotSaveError(
                f"{owner}: attribute {name!r} ({kind}) can't be saved: {error}. {_REMEDY}"
            ) from error
    return list(parts)


def _layers(env: gym.Env[Any, Any]) -> list[gym.Env[Any, Any]]:
    """The wrappers, outermost first, and the base."""
    if not isinstance(env, gym.Env):
        raise TypeError(f"expected a gymnasium.Env, got {type(env).__name__}")
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _name(layer: gym.Env[Any, Any]) -> str:
    return f"environment layer {type(layer).__module__}.{type(layer).__qualname__}"


def _has_protocol(base: gym.Env[Any, Any]) -> bool:
    get, set_ = (getattr(type(base), name, None) for name in ("get_state", "set_state"))
    try:  # MuJoCo's set_state takes positions and velocities
        inspect.signature(get).bind(base)  # type: ignore[arg-type]
        inspect.signature(set_).bind(base, None)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _can_be_pickled(base: gym.Env[Any, Any], fixtures: dict[Where, Any], names: Names) -> bool:
    try:
        _save_parts(StateSaver(io.BytesIO(), fixtures, names), _name(base), _attributes(base))
    except CannotSaveError:
        return False
    return True


def _attributes(layer: gym.Env[Any, Any]) -> dict[str, object]:
    """What is saved of a layer, by name."""
    return {name: value for name, value in vars(layer).items() if name not in _CONSTANTS}


def _protocol_parts(base: gym.Env[Any, Any]) -> dict[str, object]:
    """What is saved of a base environment that tells its state itself."""
    kept = {name: value for name, value in vars(base).items() if name in _GYMNASIUM}
    return {**kept, "get_state()": base.get_state()}  # type: ignore[attr-defined]


def _fixtures(layers: list[gym.Env[Any, Any]]) -> dict[Where, Any]:
    """What a new environment has of its own, by where it is found; the same for each of a make."""
    fixtures: dict[Where, Any] = {}
    for index, layer in enumerate(layers):
        fixtures[index,] = layer
        for name, value in vars(layer).items():
            found = {(): value} if is_a(value, EnvSpec) else kept(value)
            fixtures |= {(index, name, *where): one for where, one in found.items()}
            if not found:
                _add_functions(fixtures, (index, name), value)
        for depth, cls in enumerate(type(layer).__mro__):
            if not importable(cls):  # of a script, sent to this process by value
                fixtures[index, "class", depth] = cls
                for name, value in globals_of(cls).items():
                    if is_a(value, type) and value.__module__ == cls.__module__:
                        fixtures[index, "class", depth, name] = value
    return fixtures


def _add_functions(fixtures: dict[Where, Any], where: Where, value: object) -> None:
    function = value.__func__ if is_a(value, types.MethodType) else value
    if not is_a(function, types.FunctionType) or importable(function):
        return
    if not any(function is known for known in fixtures.values()):
        fixtures[where] = function
        for index, cell in enumerate(contents(function)):
            for content in cell:
                _add_functions(fixtures, (*where, index), content)


def _functions(fixtures: dict[Where, Any]) -> Iterator[tuple[Where, types.FunctionType]]:
    return ((k, f) for k, f in fixtures.items() if is_a(f, types.FunctionType))


def _engines(fixtures: dict[Where, Any]) -> Iterator[tuple[Where, Any]]:
    """Each once: wrappers refer to the base's."""
    seen = {id(value): where for where, value in fixtures.items() if is_engine(value)}
    return ((where, fixtures[where]) for where in seen.values())


def _description(layers: list[gym.Env[Any, Any]], fixtures: dict[Where, Any]) -> list[str]:
    """What the saved environment and the one to restore must have in common."""
    lines = [_name(layer) for layer in layers]
    for _, function in _functions(fixtures):
        lines.append(f"function {function.__qualname__} with code {code_digest(function)}")
    for _, engine in _engines(fixtures):
        lines += describe_engine(engine)
    return lines


def _check_makeup(new: list[str] | None, now: list[str]) -> None:
    """Raise CannotSaveError if no new environment could take the state."""
    if new is None or new == now:
        return
    lacking, surplus = _differing(new, now)
    raise CannotSaveError(
        f"the environment isn't made up as it was when it was new, when it had: {lacking}. It now "
        f"has: {surplus}. No new one could take its state: have the constructor make what reset "
        "makes anew (functions, engines), and let reset change what is in it"
    )


def _compare(saved: list[str], here: list[str]) -> None:
    if saved == here:
        return
    missing, surplus = _differing(saved, here)
    raise ValueError(
        "the state is that of an environment of another make. Only the saved one has: "
        f"{missing}. Only this one has: {surplus}. Restore it in an environment of the factory "
        "that made the saved one"
    )


def _differing(first: list[str], second: list[str]) -> tuple[str, str]:
    """What only the first has, and what only the second has."""
    pairs = (first, second), (second, first)
    only = ("; ".join(x for x in a if x not in b) for a, b in pairs)
    here, there = (each or "the same, or nothing more" for each in only)
    return here, there
