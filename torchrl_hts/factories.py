"""Environment factories with something around them; runs in executors, and so without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["initialised"]

_called: set[int] = set()  # collectors whose init_fn has been called in this process


class _AfterInit:
    """Calls a function before the first environment of a process is made."""

    def __init__(self, factory: Callable[[], Any], init_fn: Callable[[], Any], mark: int) -> None:
        self.factory, self.init_fn, self.mark = factory, init_fn, mark

    def __call__(self) -> Any:
        if self.mark not in _called:
            self.init_fn()
            _called.add(self.mark)
        return self.factory()


def initialised(
    factories: Sequence[Callable[[], Any]], init_fn: Callable[[], Any]
) -> list[Callable[[], Any]]:
    """The factories, of which the first that a process calls calls `init_fn` before."""
    # Equal factories stay one object: each is pickled once.
    wrapped = {id(factory): _AfterInit(factory, init_fn, id(init_fn)) for factory in factories}
    return [wrapped[id(factory)] for factory in factories]
