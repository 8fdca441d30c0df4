"""Ctrl-C and the like: the first one is noted, so that the run can end well; a second ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from support.errors import InterruptedTwice

__all__ = ["StopSignals"]

_BEFORE = b"stopping after this update; once more to stop at once, without saving"
_SAVED = b"stopping; the training is done and saved"
_ONE_WISH_S = 2.0  # a signal to a whole group reaches a learner twice: torchrun passes its own on


class StopSignals:
    """Takes SIGINT, SIGTERM and SIGHUP from `take` to `give_back`.

    Args:
        tells: whether this process says that it stops.
        has_saved: whether the run has been saved for its end.
        clock: of seconds.

    Attributes:
        number: of the signal that this process was sent; None so far.
    """

    def __init__(
        self,
        tells: Callable[[], bool],
        has_saved: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tells, self._has_saved, self._clock = tells, has_saved, clock
        self.number: int | None = None

    def take(self) -> None:
        """Begin to take them, but for those that are ignored, as SIGHUP is under nohup.

        In a thread, as of Ray Train, there is nothing to take: they reach the main thread alone.
        """
        self._handlers = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if _is_main_thread() and signal.getsignal(number) is not signal.SIG_IGN
        }

    def give_back(self, *, ignoring_sigterm: bool) -> None:
        """Let them do what they did before; or let SIGTERM, which torchrun sends, do nothing."""
        if ignoring_sigterm and _is_main_thread():
            self._handlers[signal.SIGTERM] = signal.SIG_IGN
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            if number != signal.SIGINT and self._clock() < self._first_at + _ONE_WISH_S:
                return
            raise InterruptedTwice(saved=self._has_saved())
        self.number, self._first_at = number, self._clock()
        if not self._tells():
            return
        # Not by print, in the middle of which the signal may have come.
        with contextlib.suppress(OSError):  # from a terminal that has been closed
            os.write(2, b"\n" + (_SAVED if self._has_saved() else _BEFORE) + b"\n")


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
