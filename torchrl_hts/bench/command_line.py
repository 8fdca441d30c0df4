"""Values and directories on command lines: of bench, testing and the benchmarks."""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path

__all__ = ["count", "make_directory", "positive"]


def count(text: str) -> int:
    """A whole number of at least 1, as a ``type`` of argparse.

    Raises:
        argparse.ArgumentTypeError: if it is anything else.

    >>> count("16"), count("10_000")
    (16, 10000)
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def positive(text: str) -> float:
    """A finite number above 0, as a ``type`` of argparse.

    Raises:
        argparse.ArgumentTypeError: if it is anything else.

    >>> positive("1e-3")
    0.001
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def make_directory(path: Path) -> None:
    """Make the directory that ``--output-dir`` names, with those above it, if it isn't there.

    Raises:
        SystemExit: if it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(
            f"error: --output-dir {path} can't be made: {error.strerror}; name a directory"
        ) from None
