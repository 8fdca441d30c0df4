"""Shutdowns that may be asked for at any moment, and moments in which they must not come.

A signal handler, or a finalizer that the garbage collector runs, may shut a collector down between
any two lines of the same thread. That may be in the middle of a message to a worker server, and
locks keep nothing away there. A shutdown that is asked for there follows right after. Other threads
are kept away by locks, as ever.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["Ending", "endings_wait"]

P = ParamSpec("P")
T = TypeVar("T")


class _Thread(threading.local):
    """What a thread is at."""

    within = False
    put_off: tuple[Callable[[], None], ...] = ()


_thread = _Thread()


def endings_wait(function: Callable[P, T]) -> Callable[P, T]:
    """Let no `Ending` of this thread come in the middle of a function; exceptions still may."""

    # Not a context manager: an exception can come between its beginning and the body.
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        before = _thread.within
        try:
            _thread.within = True
            return function(*args, **kwargs)
        finally:
            _thread.within = before
            if not before and _thread.put_off:
                _catch_up()

    return call


def _catch_up() -> None:
    while _thread.put_off:  # what remains after an exception comes with the next one
        call, *rest = _thread.put_off
        _thread.put_off = tuple(rest)
        call()


class Ending:
    """What ends something: once, however often it is asked for, by whomever and whenever.

    While it is under way, in another thread or interrupted by a signal handler, further calls
    return at once. One that an exception has cut short is taken up by the next.
    """

    def __init__(self) -> None:
        self._at_work: list[object] = []
        self._done = False

    def __call__(self, end: Callable[[], None]) -> None:
        """End it by ``end``, which releases what there is, and may be called after an exception."""
        if _thread.within:
            again = functools.partial(self, end)
            # Twice, which is once if all goes well: an exception may cut the first short.
            _thread.put_off = (*_thread.put_off, again, again)
            return
        this = object()
        try:
            self._at_work.append(this)
            if self._at_work[0] is this and not self._done:
                end()
                self._done = True
        finally:
            if this in self._at_work:
                self._at_work.remove(this)
