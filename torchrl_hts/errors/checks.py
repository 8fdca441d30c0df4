"""The checks of numbers that users give, or that were saved: once for all packages."""

from __future__ import annotations

import contextlib
from math import inf
from numbers import Integral, Real
from typing import Any

__all__ = ["LARGEST_INT", "check_integer", "check_seconds"]

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
