"""Where Python's and numpy's random generators keep their words, and how these are copied.

Both are Mersenne Twisters. Their own functions for that take longer than many steps of a fast
environment. So the words are copied in memory, where they lie as it is tried first.
"""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = [
    "SIZE",
    "WORDS",
    "Asked",
    "InMemory",
    "find_numpy",
    "find_python",
    "forget_pairs",
    "get_numpy",
    "get_python",
    "set_numpy",
    "set_python",
]

SIZE = 624  # words of a Mersenne Twister, which both are
WORDS = SIZE + 1  # and the index of the next one

_inst: Any = random._inst
_bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
_use_bits: Any = np.random.set_bit_generator  # type: ignore[attr-defined]


class InMemory:
    """A generator of the process, whose words lie in memory one after the other.

    Attributes:
        mark: its one item changes with every draw and every seed.
    """

    def __init__(self, address: int, mark_at: int) -> None:
        block = memoryview((ctypes.c_uint32 * WORDS).from_address(address)).cast("B")
        self.words = block.cast("I")
        self.mark: Any = block[4 * mark_at : 4 * mark_at + 8].cast("Q")

    def take(self, words: memoryview) -> None:
        """Copy its words."""
        words[:] = self.words

    def put(self, words: memoryview) -> None:
        """Set its words."""
        self.words[:] = words


class Asked:
    """The same by public functions, which take long; there is no telling whether it has drawn."""

    def __init__(self, get: Callable[[], list[int]], set_: Callable[[list[int]], None]) -> None:
        self.get, self.set = get, set_
        self.mark: Any = [float("nan")]

    def take(self, words: memoryview) -> None:
        words[:] = memoryview(array("I", self.get()))

    def put(self, words: memoryview) -> None:
        self.set(words.tolist())


# Python's: the index comes first.


def get_python() -> list[int]:
    *words, index = _inst.getstate()[1]
    return [index, *words]


def set_python(words: list[int]) -> None:
    _inst.setstate((_inst.VERSION, (*words[1:], words[0]), None))


def find_python() -> InMemory | Asked:
    start, base = object.__basicsize__, random.Random.__base__
    if base is not None and base.__basicsize__ >= start + 4 * WORDS:
        found = InMemory(id(_inst) + start, 0)
        if found.words.tolist() == get_python():
            return found
    return Asked(get_python, set_python)


# Numpy's: the index comes last.


def get_numpy() -> list[int]:
    state = _bits.state["state"]
    return [*state["key"].tolist(), state["pos"]]


def set_numpy(words: list[int]) -> None:
    state = {"key": np.array(words[:SIZE], np.uint32), "pos": words[SIZE]}
    _bits.state = {"bit_generator": "MT19937", "state": state}


def find_numpy() -> InMemory | Asked:
    found = InMemory(_bits.ctypes.state_address, SIZE - 1)
    return found if found.words.tolist() == get_numpy() else Asked(get_numpy, set_numpy)


def forget_pairs() -> None:
    """Forget the second numbers of pairs that have been drawn, which aren't among the words."""
    _inst.gauss_next = None
    _use_bits(_bits)  # which forgets numpy's
