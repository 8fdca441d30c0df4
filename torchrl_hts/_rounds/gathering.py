"""How many observations an actor waits for before it runs the policy.

A forward pass of few rows costs nearly as much as one of many. As long as executors and the learner
keep every core busy, a pass started now would only take a core from one of them. Nothing is lost by
waiting until one of them has nothing left to do, and then there are more rows. An executor that can
tell so (`fills_cores`) announces nothing meanwhile, which would wake the actor in vain, until it
has nothing left to step. With a core to spare an actor takes at once whatever is ready. And it
never waits for long: what looks like work may be an environment or a learner that waits for
something else. What the policy computes for a row does not depend on the rows beside it, so none of
this changes a bit (I6).
"""

from __future__ import annotations

import time
from array import array
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrl_hts._rounds.exchange import STOP
from torchrl_hts._rounds.inbox_reader import InboxReader
from torchrl_hts._rounds.schedule import Phase, Schedule
from torchrl_hts._rounds.shared_memory import Counter

__all__ = ["Gatherer", "fills_cores"]

# An executor whose environments use less of a core than this sleeps rather than computes.
_COMPUTES = 0.25
# Plain integers: to look a member of an enum up takes longer than to count.
_CPU_NS, _BUSY_NS = int(Counter.CPU_NS), int(Counter.BUSY_NS)
# Not every change is announced (a last environment is parked): look again after so long.
_LOOK_AGAIN_MS = 2
# Which executors compute changes slowly, and to look at them all takes a tenth of a small pass.
_COUNT_EVERY = 16


def fills_cores(schedule: Schedule, counters: memoryview[int], cores: int | None) -> bool:
    """Whether an executor that is stepping fills all cores, with the learner if that learns.

    Then a lone actor would wait for more than what is passed on now.

    Args:
        schedule: the schedule, over shared words.
        counters: those of the executor.
        cores: as many as are to be kept busy; None if there are several actors.
    """
    if cores is None or 1 + schedule.learning < cores:
        return False
    return bool(_computes(counters[_CPU_NS], counters[_BUSY_NS]))


def _computes(cpu_ns: Any, busy_ns: Any) -> Any:
    """Whether executors that used so much of a core while busy compute rather than sleep."""
    return cpu_ns > _COMPUTES * busy_ns


class Gatherer:
    """The actors' inbox, as an actor reads it.

    Args:
        reader: reads the actors' inbox.
        owner: for each environment, the index of its executor.
        counters: the counters, ``[workers, counters]``, the executors' rows first.
        cores: the number of cores that the collector may use. None if there are other actors: to
            wait for more in an inbox that others read too would be to wait for what they took.

    Attributes:
        waited_ns: how long the last `gather` waited for more than it had.
    """

    def __init__(
        self,
        reader: InboxReader,
        owner: tuple[int, ...],
        counters: npt.NDArray[np.int64],
        cores: int | None,
    ) -> None:
        self.reader = reader
        self.inbox = reader.inbox
        self.schedule = reader.schedule
        self.counters = counters
        self.waited_ns = 0
        self._num_executors = max(owner) + 1
        self._owner = np.array(owner)
        self._phase: npt.NDArray[Any] = np.asarray(self.schedule.phase)
        # Not to be reached where the learner and all executors don't fill so many cores.
        self._cores = cores if cores is not None and cores <= self._num_executors + 1 else None
        self._num_computing = self._questions = 0

    def gather(self, patience_ns: int) -> array[int]:
        """Sleep until there is something; then wait for more while every core is busy.

        Args:
            patience_ns: how long to wait for more, at most (up to a timer's tick of 1 ms).

        Raises:
            EOFError: if every writer is gone.
        """
        words = self.reader.read()
        self.waited_ns = 0
        if not self.every_core_is_busy():
            return words
        began = time.perf_counter_ns()
        deadline = began + patience_ns
        while STOP not in words:
            left_ms = (deadline - time.perf_counter_ns()) / 1e6
            if left_ms <= 0:
                break
            if self.inbox.is_ready(min(_LOOK_AGAIN_MS, ceil(left_ms))):
                words.extend(self.inbox.read())
            if not self.every_core_is_busy():
                break
        self.waited_ns = time.perf_counter_ns() - began
        return words

    def every_core_is_busy(self) -> bool:
        """Whether as many of the executors and the learner as there are cores have work to do.

        No if no executor has: then nothing more will come, and the learner may be waiting for
        something else than its core.
        """
        if self._cores is None:
            return False
        learning = self.schedule.learning
        if self._count_computing() + learning < self._cores:  # spares the look at environments
            return False
        busy = set(self._owner[self._phase == Phase.ANSWERED].tolist())
        if not busy or len(busy) + learning < self._cores:
            return False
        rows = self.counters[sorted(busy)]
        computing = _computes(rows[:, _CPU_NS], rows[:, _BUSY_NS])
        return bool(computing.sum() + learning >= self._cores)

    def _count_computing(self) -> int:
        """How many executors compute rather than sleep, as it was a few questions ago."""
        if self._questions % _COUNT_EVERY == 0:
            rows = self.counters[: self._num_executors]
            self._num_computing = int(_computes(rows[:, _CPU_NS], rows[:, _BUSY_NS]).sum())
        self._questions += 1
        return self._num_computing
