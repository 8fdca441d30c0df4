"""Numbers that environments tell in the ``info`` of a step, by names that somebody has chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import nan
from numbers import Real
from typing import Any

import numpy as np

from torchrl_hts._executor.written_once import collector_names
from torchrl_hts._rounds.keys import Key, named
from torchrl_hts._rounds.shared_memory import Array, Field
from torchrl_hts.errors import InvalidValueError

__all__ = ["InfoKey", "check_info_keys", "info_fields", "info_number", "info_numbers"]

InfoKey = tuple[str, ...]


def check_info_keys(info_keys: Any) -> tuple[InfoKey, ...]:
    """Keys as tuples, each of them once.

    Args:
        info_keys: a list of names, and of tuples of names for what lies deeper; None for nothing.

    Raises:
        TypeError: for anything else.
        ValueError: if one lies within another.

    Example:
        >>> check_info_keys(["is_success", ("episode", "r")])
        (('is_success',), ('episode', 'r'))
    """
    if info_keys is None:
        return ()
    if isinstance(info_keys, str) or not isinstance(info_keys, Sequence):
        raise TypeError(
            "info_keys must be a list of names and tuples of names, such as "
            f"['is_success', ('episode', 'r')], got {info_keys!r}"
        )
    keys: dict[InfoKey, None] = {}
    for key in info_keys:
        path = (key,) if isinstance(key, str) else key
        if (
            not isinstance(path, Sequence)
            or not path
            or not all(isinstance(name, str) and name for name in path)
        ):
            raise TypeError(
                f"info_keys has the entry {key!r}; expected a name, or a tuple of names for what "
                "lies deeper, such as ('episode', 'r')"
            )
        keys[tuple(path)] = None
    for one in keys:
        for other in keys:
            if len(one) < len(other) and other[: len(one)] == one:
                raise ValueError(
                    f"info_keys has {named(one)} and, within it, {named(other)}; "
                    "what holds other entries is no number: leave it out"
                )
    return tuple(keys)


def info_fields(info_keys: Iterable[InfoKey], others: Iterable[Key]) -> list[Field]:
    """Where the numbers lie in a batch: below ``"next"``, float64 ``[N, T, 1]``.

    Args:
        info_keys: what `check_info_keys` has returned.
        others: keys of all other fields.

    Raises:
        ValueError: if one has the name of something else, or lies within it.
    """
    taken = {key[1:] if key[0] == "next" else key for key in others}
    taken |= {(name,) for name in collector_names()}
    for key in info_keys:
        for other in taken:
            common = min(len(key), len(other))
            if key[:common] == other[:common]:
                raise ValueError(
                    f"info_keys has {named(key)}, but batches have {named(other)} "
                    "already, which is something else: rename the info's entry with a "
                    "gymnasium.Wrapper"
                )
    return [Field(("next", *key), (1,), "float64") for key in info_keys]


def info_number(info: Any, key: InfoKey) -> float:
    """The number that an ``info`` has at a key; NaN if there is none, or None.

    Raises:
        InvalidValueError: if there is something else.

    Example:
        >>> info_number({"episode": {"r": 9}}, ("episode", "r")), info_number({}, ("won",))
        (9.0, nan)
    """
    value = _found(info, key)
    if value is None:
        return nan
    if isinstance(value, Real):  # numpy's scalars and bools too
        return float(value)
    try:
        array = np.asarray(value)
    except Exception:  # whatever a tensor of a device, say, has against it
        array = np.empty(0)
    if array.dtype.kind not in "biuf" or array.size != 1 or np.ma.is_masked(value):
        raise InvalidValueError(
            f"the environment returned {_called(key)} = {value!r}; info_keys takes what is one "
            "number or bool, or leave it out there"
        )
    return float(array.item())


def info_numbers(infos: Any, key: InfoKey, count: int) -> Array:
    """The numbers that the ``infos`` of a batch have at a key: float64 ``[count]``.

    NaN where an environment has none, as the flags under ``"_name"`` tell.

    Raises:
        InvalidValueError: if there is something else.

    Example:
        >>> infos = {"lives": np.array([3, 0]), "_lives": np.array([True, False])}
        >>> info_numbers(infos, ("lives",), 2), info_numbers(infos, ("won",), 2)
        (array([ 3., nan]), array([nan, nan]))
    """
    numbers = np.full(count, nan)
    value = _found(infos, key)
    if value is None:
        return numbers
    array = np.asarray(value)
    if array.shape[:1] != (count,):
        raise InvalidValueError(
            f"the environments returned {_called(key)} = {value!r}; info_keys takes an array with "
            f"one number of each of the {count} environments"
        )
    has, level = np.ones(count, bool), infos
    for name in key:
        has &= np.asarray(level.get(f"_{name}", True), bool)
        level = level[name]
    if array.dtype.kind in "biuf" and array.size == count:
        numbers[has] = array.reshape(count)[has]
        return numbers
    for index in np.flatnonzero(has).tolist():
        numbers[index] = info_number({key[-1]: array[index]}, key[-1:])
    return numbers


def _found(info: Any, key: InfoKey) -> Any:
    """What lies at a key; None if nothing does."""
    value = info
    for depth, name in enumerate(key):
        if not isinstance(value, Mapping):
            raise InvalidValueError(
                f"the environment returned {_called(key[:depth])} = {value!r}, in which info_keys "
                f"looks for {name!r}: expected a dict"
            )
        value = value.get(name)
        if value is None:
            return None
    return value


def _called(key: InfoKey) -> str:
    return "info" + "".join(f"[{name!r}]" for name in key)
