"""Moments in which a shutdown must not come: asked for within them, it follows right after.

A signal handler, or a finalizer that the garbage collector runs, may shut a collector down between
any two lines of the same thread, where locks keep nothing away: in the middle of a message to a
worker server, say. Other threads are kept away by locks, as ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

__all__ = ["put_off", "undivided"]


class _Thread(threading.local):
    """What a thread is at."""

    def __init__(self) -> None:
        self.within = False
        self.calls: list[Callable[[], None]] = []


_thread = _Thread()


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Let nothing that is `put_off` come in between; exceptions still may.

    Example:
        >>> with undivided():
        ...     print(put_off(lambda: print("after it")), "within it")
        True within it
        after it
    """
    before = _thread.within
    try:
        _thread.within = True
        yield
    finally:
        _thread.within = before
        while not before and _thread.calls:
            _thread.calls.pop(0)()


def put_off(call: Callable[[], None]) -> bool:
    """Whether the call has to wait: then it follows at the end of the `undivided` code.

    Example:
        >>> put_off(lambda: None)
        False
    """
    if _thread.within:
        _thread.calls.append(call)
    return _thread.within
