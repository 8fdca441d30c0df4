"""The checks of what users give, or what was saved: once for all packages. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from math import inf
from numbers import Integral, Real
from typing import Any

import numpy as np

__all__ = [
    "LARGEST_INT",
    "check_flags",
    "check_integer",
    "check_number",
    "check_positive",
    "check_seconds",
    "check_state",
]

LARGEST_INT = 2**63 - 1  # of shared words and of TensorDicts


def check_integer(name: str, value: Any, *, least: int = 1, most: int | None = LARGEST_INT) -> int:
    """An integer of at least, and of at most some value; None: of any size.

    It may come as a float without a fraction, such as 1e6, or as an array or tensor of one number,
    as which checkpoints give it back.

    Raises:
        TypeError: if it isn't a whole number.
        ValueError: if it is too small or too large.
    """
    number = value
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
        number = value.item()  # which an array of more than one number refuses
    whole = isinstance(number, Integral) or (
        isinstance(number, Real) and float(number).is_integer()
    )
    if isinstance(number, bool) or not whole:
        raise TypeError(f"{name} must be an int, got {value!r}")
    number = int(number)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return number


def check_number(name: str, value: Any, *, least: float = -inf) -> float:
    """A number of at least some value; infinity is one.

    Raises:
        TypeError: if it isn't a number.
        ValueError: if it is too small, or NaN.
    """
    number = value
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    found = float(number)
    if not found >= least:
        raise ValueError(f"{name} must be at least {least:g}, got {value!r}")
    return found


def check_positive(**numbers: Any) -> None:
    """Numbers above 0."""
    for name, value in numbers.items():
        if not check_number(name, value) > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")


def check_flags(**given: Any) -> None:
    """Arguments that are either True or False."""
    for name, value in given.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_state(state_dict: Any, entries: Iterable[str]) -> None:
    """What is given to `load_state_dict`.

    Raises:
        TypeError: if it isn't a mapping.
        ValueError: if one of the entries is missing.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping, got {type(state_dict).__name__}")
    if missing := set(entries) - state_dict.keys():
        raise ValueError(
            f"state_dict lacks {', '.join(sorted(missing))}: give what state_dict() returned"
        )


def check_seconds(name: str, value: Any) -> float:
    """A positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = inf
    if not 0 < seconds < inf:
        raise ValueError(f"{name} must be more than 0 seconds, and finite, got {value}")
    return seconds
