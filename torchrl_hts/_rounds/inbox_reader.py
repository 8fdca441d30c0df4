"""How long a worker looks for messages before it goes to sleep.

Going to sleep and being woken costs more than a step of a cheap environment, and whoever wakes
finds nothing in the caches. So a worker whose last wait was short keeps looking for a moment. It
does so if every executor and every actor has a core of its own, and if the learner waits, which may
have a thread on every core. So nothing is taken from anybody. With nothing to do all sleep. What is
computed does not depend on it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

from torchrl_hts._rounds.exchange import Inbox
from torchrl_hts._rounds.schedule import Schedule

__all__ = ["Clock", "InboxReader"]

_LOOK_NS = 200_000
_SHORT_NS = 2 * _LOOK_NS  # a wait after which the next one is expected to be short as well


class Clock(NamedTuple):
    """What a reader, and the loop that it reads for, tell the time by.

    Attributes:
        now_ns: nanoseconds, from any moment on.
        used_ns: of processor time that this process has used.
    """

    now_ns: Callable[[], int] = time.perf_counter_ns
    used_ns: Callable[[], int] = time.process_time_ns


_CLOCK = Clock()


class InboxReader:
    """An inbox, as its owner reads it.

    Args:
        inbox: the inbox.
        schedule: the schedule, over shared words: it tells whether the learner waits.
        a_core_each: whether there are enough cores for all threads of executors and actors.
        clock: tells how long waits are.

    Attributes:
        a_core_each, clock: as given.
        looking_ns: processor time that went into looking, and is not to count as work.
    """

    def __init__(
        self, inbox: Inbox, schedule: Schedule, *, a_core_each: bool, clock: Clock = _CLOCK
    ) -> None:
        self.inbox = inbox
        self.schedule = schedule
        self.looking_ns = 0
        self.a_core_each = a_core_each
        self.clock = clock
        self._waits_are_short = False

    def read(self) -> array[int]:
        """See `Inbox.read`."""
        if not self.a_core_each:
            return self.inbox.read()
        if self.inbox.is_ready():
            self._waits_are_short = True
            return self.inbox.read()
        began, used = self.clock.now_ns(), self.clock.used_ns()
        words = self.inbox.read(_LOOK_NS if self.may_look() else 0)
        self.looking_ns += self.clock.used_ns() - used
        self._waits_are_short = self.clock.now_ns() - began < _SHORT_NS
        return words

    def may_look(self) -> bool:
        """Whether something is expected soon, and the learner waits; with a core each."""
        return self._waits_are_short and not self.schedule.learning
