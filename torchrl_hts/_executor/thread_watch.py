"""Whether anybody draws from a process's random generators while environments play in its threads.

Threads share these generators. Which numbers each environment got would be a matter of timing. So
nobody may draw meanwhile: the generators are to be where they were when the first began. Nor may
anybody set a state, for one that is put back after a draw leaves no trace.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["ThreadWatch"]


class ThreadWatch:
    """Notices draws while environments play in threads.

    Args:
        marks: each has one item, which changes with every draw from Python's or numpy's generator.

    Attributes:
        num_playing: how many environments play in threads just now.
    """

    def __init__(self, *marks: Any) -> None:
        self.num_playing = 0
        self._marks = marks
        self._before: list[Any] = []  # what the marks were
        self._torch: Any = None  # once it has been imported
        self._torch_before: Any = None  # the state of its generator
        self._was_set = False

    def begin(self) -> None:
        """An environment begins to play in a thread: until it ends, nobody may draw."""
        if not self.num_playing:
            self._before = [mark[0] for mark in self._marks]
            self._was_set = False
            self._look_at_torch(sys.modules.get("torch"))
            self._hear_of("setstate", random)
            self._hear_of("set_state", np.random)
        self.num_playing += 1

    def end(self) -> None:
        """It has ended.

        Raises:
            RuntimeError: somebody has drawn meanwhile.
        """
        try:
            self.check()
        finally:
            self.num_playing -= 1

    def give_up(self) -> None:
        """Nobody asks any more for what one plays that hasn't ended."""
        self.num_playing -= 1

    def check(self) -> None:
        """See whether all is as it was.

        Raises:
            RuntimeError: it isn't, and environments play in threads.
        """
        if self.num_playing and self._has_drawn():
            raise RuntimeError(
                "an environment of this executor, which one is not known, has drawn from random, "
                "np.random or torch's default generator, or has forked, which draws too, while "
                "environments of make_in_thread played. Threads share these generators, so what "
                "each draws would be a matter of timing. Draw from the environment's np_random, "
                "once super().reset(seed=seed) has seeded it, or use make_in_thread for none of "
                "these environments"
            )

    def found_torch(self, torch: ModuleType) -> None:
        """It has been imported, and its generator is where nobody has drawn from it."""
        if self.num_playing:
            self._look_at_torch(torch)

    def _look_at_torch(self, torch: Any) -> None:
        if torch is not None and hasattr(torch, "default_generator"):
            self._torch_before = torch.default_generator.get_state()
            self._torch = torch
            self._hear_of("set_rng_state", torch, torch.random)

    def _has_drawn(self) -> bool:
        if self._was_set or [mark[0] for mark in self._marks] != self._before:
            return True
        if self._torch is None:
            return False
        state = self._torch.default_generator.get_state()
        return not self._torch.equal(self._torch_before, state)

    def _hear_of(self, name: str, *modules: Any) -> None:
        """Have it noted when a function, which some modules have, sets a generator's state."""
        function: Callable[..., Any] = getattr(modules[0], name)
        if hasattr(function, "is_heard_of"):
            return

        @functools.wraps(function)
        def noting(*args: Any, **named: Any) -> Any:
            self._was_set |= self.num_playing > 0
            return function(*args, **named)

        noting.is_heard_of = True  # type: ignore[attr-defined]
        for module in modules:
            setattr(module, name, noting)
