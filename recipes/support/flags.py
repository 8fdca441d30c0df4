"""Kinds of command-line flags. Nothing here imports torch."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Collection, Sequence

__all__ = ["HelpFormatter", "as_switches", "counted", "integer", "positive"]


def integer(text: str) -> int:
    """An integer of the command line, which may be written as 1e6, as collectors take it.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")


def counted(text: str) -> int:
    """An integer of the command line that is at least 1.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    if (value := integer(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, and is {value}")
    return value


def positive(text: str) -> float:
    """A number above 0 of the command line.

    Raises:
        argparse.ArgumentTypeError: if it is no number above 0.
    """
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")


def as_switches(arguments: Sequence[str], switches: Collection[str]) -> list[str]:
    """Command-line words with ``--memory=False`` as ``--no-memory``: W&B's agents say it so.

    Args:
        arguments: the words.
        switches: the flags that are on or off.
    """
    words = []
    for word in arguments:
        flag, _, value = word.partition("=")
        if flag in switches and value.lower() in ("true", "false"):
            word = flag if value.lower() == "true" else f"--no-{flag[2:]}"
        words.append(word)
    return words


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the description as it is written, and explanations in a column of their own."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)
