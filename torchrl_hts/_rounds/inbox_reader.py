"""How long a worker looks for messages before it goes to sleep.

Going to sleep and being woken costs more than a step of a cheap environment, and whoever wakes
finds nothing in the caches. So a worker whose last wait was short keeps looking for a moment,
provided that every executor and every actor has a core of its own, and that the learner waits: it
may have a thread on every core. So nothing is taken from anybody. With nothing to do all sleep.
What is computed does not depend on it.
"""

from __future__ import annotations

import time
from array import array

from torchrl_hts._rounds.exchange import Inbox
from torchrl_hts._rounds.schedule import Schedule

__all__ = ["InboxReader"]

_LOOK_NS = 200_000
_SHORT_NS = 2 * _LOOK_NS  # a wait after which the next one is expected to be short as well


class InboxReader:
    """An inbox, as its owner reads it.

    Args:
        inbox: the inbox.
        schedule: the schedule, over shared words: it tells whether the learner waits.
        a_core_each: whether there are enough cores for all threads of executors and actors.

    Attributes:
        a_core_each: as given.
        looking_ns: processor time that went into looking, and is not to count as work.
    """

    def __init__(self, inbox: Inbox, schedule: Schedule, *, a_core_each: bool) -> None:
        self.inbox = inbox
        self.schedule = schedule
        self.looking_ns = 0
        self.a_core_each = a_core_each
        self._waits_are_short = False

    def read(self) -> array[int]:
        """See `Inbox.read`."""
        if not self.a_core_each:
            return self.inbox.read()
        if self.inbox.is_ready():
            self._waits_are_short = True
            return self.inbox.read()
        began, used = time.perf_counter_ns(), time.process_time_ns()
        words = self.inbox.read(_LOOK_NS if self.may_look() else 0)
        self.looking_ns += time.process_time_ns() - used
        self._waits_are_short = time.perf_counter_ns() - began < _SHORT_NS
        return words

    def may_look(self) -> bool:
        """Whether something is expected soon, and the learner waits; with a core each."""
        return self._waits_are_short and not self.schedule.learning
