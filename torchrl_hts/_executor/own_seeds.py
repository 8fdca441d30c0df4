"""Seeds that nobody gives, made each environment's own.

Many environments call ``np.random.seed(seed)`` in `reset`, where ``seed`` is None from the second
episode on. Many draw from their ``np_random``, or from a space, before anybody has seeded it. They
would begin from what the system gives, which is other each time. In a process of environments they
begin from what ``random`` or ``np.random`` gives next, and so from the collector's seed.

A space that all environments of a class share is seeded by the first that draws from it. So that
the next one in its process draws what it would alone, such seeds are forgotten once it is made.

Forked processes of an environment go on with its states. Python would have ``random`` begin anew in
them, from what the system gives. The workers of an AsyncVectorEnv get states of their own.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing.util
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

__all__ = ["own_draws", "seed_from_own_draws", "unseeded_spaces"]


def seed_from_own_draws() -> None:
    """Replace what seeds with nothing in this process, which steps environments; once is enough.

    These are ``random.seed``, ``np.random.seed``, and gymnasium's ``seeding.np_random``, which
    environments and spaces are seeded by. Who has imported one of the first two by itself (``from
    random import seed``) keeps what it has.
    """
    _replace(random, lambda: random.getrandbits(64))
    _replace(np.random, _drawn)
    _np_random.__code__ = _own_np_random.__code__  # in place: some have imported it by itself


@contextmanager
def own_draws() -> Iterator[None]:
    """The same for a while, in a process that does other things too."""
    before = random.seed, np.random.seed, _np_random.__code__
    seed_from_own_draws()
    try:
        yield
    finally:
        random.seed, np.random.seed, _np_random.__code__ = before


@contextmanager
def unseeded_spaces() -> Iterator[None]:
    """While an environment is made: spaces that are seeded with nothing are unseeded after it."""
    seeded: list[weakref.ref[gym.Space[Any]]] = []

    space_class: Any = gym.Space
    before = space_class.np_random

    def np_random(space: Any) -> Any:
        if space._np_random is None:
            seeded.append(weakref.ref(space))
        return before.fget(space)

    space_class.np_random = property(np_random, doc=before.__doc__)
    try:
        yield
    finally:
        space_class.np_random = before
        for each in seeded:
            space: Any = each()
            if space is not None:
                space._np_random = None


def _drawn() -> int:
    return int(np.random.randint(0, 1 << 32, dtype=np.uint32))


def _is_own() -> bool:
    return getattr(random.seed, "draws_its_own", False)


def _replace(module: Any, draw: Callable[[], int]) -> None:
    seed = module.seed
    if getattr(seed, "draws_its_own", False):
        return

    @functools.wraps(seed)
    def own_seed(value: Any = None, *others: Any, **named: Any) -> None:
        for name in ("a", "seed"):  # as Python and numpy call the number
            value = named.pop(name, value)
        seed(draw() if value is None else value, *others, **named)

    own_seed.draws_its_own = True  # type: ignore[attr-defined]
    module.seed = own_seed


_np_random: Any = inspect.unwrap(seeding.np_random)
_system_np_random = FunctionType(_np_random.__code__, vars(seeding), "np_random", (None,))


def _own_np_random(seed: int | None = None) -> Any:
    # Runs with the globals of gymnasium's module, in the place of its function.
    from torchrl_hts._executor import own_seeds

    return own_seeds._system_np_random(own_seeds._drawn() if seed is None else seed)


class _Forks:
    """What forked processes begin with."""

    state: Any = None  # of ``random``, when a process was forked

    def keep(self) -> None:
        self.state = random.getstate() if _is_own() else None

    def put_back(self) -> None:
        if self.state is not None:
            random.setstate(self.state)

    def spread(self) -> None:
        """Set workers apart, by their numbers in their batch."""
        name = multiprocessing.current_process().name  # Worker<AsyncVectorEnv>-0
        if self.state is None or not name.startswith("Worker<"):
            return
        number = int(name.rpartition("-")[2])
        random.seed(random.getrandbits(64) << 64 | number)
        np.random.seed([_drawn(), number])
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.manual_seed(_drawn())


_forks = _Forks()
os.register_at_fork(before=_forks.keep, after_in_child=_forks.put_back)
multiprocessing.util.register_after_fork(_forks, _Forks.spread)
