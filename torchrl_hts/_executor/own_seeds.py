"""Seeds that nobody gives, made each environment's own.

Many environments call ``np.random.seed(seed)`` in `reset`, where ``seed`` is None from the second
episode on. Many draw from their ``np_random``, or from a space, before anybody has seeded it. They
would begin from what the system gives, which is other each time. In a process of environments they
begin from what ``random`` or ``np.random`` gives next, and so from the collector's seed.

A space that all environments of a class share is seeded by the first that draws from it. So that
the next one in its process draws what it would alone, such seeds are forgotten once it is made.

In forked processes Python has ``random`` begin anew, from what the system gives. In those of an
environment it begins from what its parent draws. Workers of an AsyncVectorEnv, forked or spawned,
have generators of their own.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

from torchrl_hts._executor.generators import Generators

__all__ = ["drawn_seed", "own_draws", "seed_from_own_draws", "unseeded_spaces"]


def seed_from_own_draws() -> None:
    """Replace what seeds with nothing in this process, which steps environments; once is enough.

    These are ``random.seed``, ``np.random.seed``, and gymnasium's ``seeding.np_random``, which
    environments and spaces are seeded by; and the constructor of AsyncVectorEnv. Who has imported
    one of the first two by itself (``from random import seed``) keeps what it has.
    """
    if _is_own():
        return
    random.seed = _own_seed(random.seed, lambda: random.getrandbits(64))
    np.random.seed = _own_seed(np.random.seed, drawn_seed)
    _np_random.__code__ = _own_np_random.__code__  # in place: some have imported it by itself
    _async.__init__ = _with_own_workers(_async.__init__)


@contextmanager
def own_draws() -> Iterator[None]:
    """The same for a while, in a process that does other things too."""
    before = random.seed, np.random.seed, _np_random.__code__, _async.__init__
    seed_from_own_draws()
    try:
        yield
    finally:
        random.seed, np.random.seed, _np_random.__code__, _async.__init__ = before


@contextmanager
def unseeded_spaces() -> Iterator[None]:
    """While an environment is made: spaces that are seeded with nothing are unseeded after it."""
    before = _space.np_random
    seeded: list[weakref.ref[Any]] = []

    def np_random(space: Any) -> Any:
        if space._np_random is None:
            seeded.append(weakref.ref(space))
        return _space_np_random.fget(space)

    def end() -> None:
        _space.np_random = before
        for each in seeded:
            space = each()
            if space is not None:
                space._np_random = None

    _space.np_random = property(np_random, doc=before.__doc__)
    _forks.ends.append(end)
    try:
        yield
    finally:
        if end in _forks.ends:  # which is not so in a process that was forked meanwhile
            _forks.ends.remove(end)
            end()


_space: Any = gym.Space
_space_np_random = _space.np_random


def drawn_seed() -> int:
    """A seed of 32 bits that ``np.random`` draws."""
    return int(np.random.randint(0, 1 << 32, dtype=np.uint32))


def _is_own() -> bool:
    return getattr(random.seed, "draws_its_own", False)


def _own_seed(seed: Callable[..., None], draw: Callable[[], int]) -> Callable[..., None]:
    @functools.wraps(seed)
    def own_seed(value: Any = None, *others: Any, **named: Any) -> None:
        for name in ("a", "seed"):  # as Python and numpy call the number
            value = named.pop(name, value)
        seed(draw() if value is None else value, *others, **named)

    own_seed.draws_its_own = True  # type: ignore[attr-defined]
    return own_seed


_async: Any = gym.vector.AsyncVectorEnv
_np_random: Any = inspect.unwrap(seeding.np_random)
_system_np_random = FunctionType(_np_random.__code__, vars(seeding), "np_random", (None,))


def _own_np_random(seed: int | None = None) -> Any:
    # Runs with the globals of gymnasium's module, in the place of its function.
    from torchrl_hts._executor import own_seeds

    return own_seeds._system_np_random(own_seeds.drawn_seed() if seed is None else seed)


class _Worker:
    """What makes an environment in a worker of an AsyncVectorEnv, with draws of its own."""

    def __init__(self, make: Callable[[], Any], seed: int, number: int) -> None:
        self._make, self._seeds, self._batch = make, [seed, number], os.getpid()

    def __call__(self) -> Any:
        if os.getpid() != self._batch:  # which makes one too, to see what the spaces are
            seed_from_own_draws()
            Generators(*self._seeds).enter()
        return self._make()


def _with_own_workers(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of an AsyncVectorEnv, whose workers draw what depends on its seeds."""

    @functools.wraps(init)
    def own_init(env: Any, env_fns: Any, *others: Any, **named: Any) -> None:
        makes = list(env_fns)
        seed = drawn_seed()
        workers = [_Worker(make, seed, number) for number, make in enumerate(makes)]
        init(env, workers, *others, **named)
        env.env_fns = makes

    return own_init


class _Forks:
    """What forked processes begin with.

    Attributes:
        ends: of what must not go on in them, the last one first to be called.
    """

    def __init__(self) -> None:
        self.ends: list[Callable[[], None]] = []
        self._seed: int | None = None

    def before(self) -> None:
        self._seed = random.getrandbits(64) if _is_own() else None

    def in_child(self) -> None:
        while self.ends:
            self.ends.pop()()
        if self._seed is not None:
            random.seed(self._seed)


_forks = _Forks()
os.register_at_fork(before=_forks.before, after_in_child=_forks.in_child)
