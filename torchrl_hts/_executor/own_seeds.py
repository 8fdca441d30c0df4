"""``random.seed()`` and ``np.random.seed()`` without a number, made each environment's own.

Many environments call ``np.random.seed(seed)`` in `reset`, where ``seed`` is None from the second
episode on. They would begin from what the system gives, which is other each time. In a process of
environments they begin from what the same generator gives next, and so from the collector's seed.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["own_draws", "seed_from_own_draws"]


def seed_from_own_draws() -> None:
    """Replace both functions in this process, which steps environments; once is enough.

    Who has imported one of them by itself (``from random import seed``) keeps what it has.
    """
    _replace(random, lambda: random.getrandbits(64))
    _replace(np.random, lambda: int(np.random.randint(0, 1 << 32, dtype=np.uint32)))


@contextmanager
def own_draws() -> Iterator[None]:
    """The same for a while, in a process that does other things too."""
    before = random.seed, np.random.seed
    seed_from_own_draws()
    try:
        yield
    finally:
        random.seed, np.random.seed = before


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
