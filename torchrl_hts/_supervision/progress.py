"""Who makes no progress: what each worker owes, by the words of the schedule, and since when.

Nothing is asked of the workers for it: the words that they write anyway tell. So also one that is
stopped (SIGSTOP), or that hangs in native code with Python's lock held, is found out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchrl_hts._rounds.schedule import Phase, Schedule
from torchrl_hts._rounds.shared_memory import Counter
from torchrl_hts.errors import WorkerId

__all__ = ["ProgressWatch", "at_work"]


class ProgressWatch:
    """Notices when a worker that owes something has not changed for too long.

    Args:
        timeouts_s: seconds by kind of worker; kinds that are left out may take any time.

    Example:
        >>> executor, actor = WorkerId("executor", 0), WorkerId("actor", 0)
        >>> watch = ProgressWatch({"executor": 5.0})
        >>> watch.overdue({executor: "step 7", actor: "batch 3"}, now=10.0)
        >>> watch.overdue({executor: "step 8", actor: "batch 3"}, now=14.0)
        >>> print(watch.overdue({executor: "step 8", actor: "batch 3"}, now=19.0))
        executor 0
    """

    def __init__(self, timeouts_s: Mapping[str, float]) -> None:
        self.timeouts_s = dict(timeouts_s)
        self._since: dict[WorkerId, tuple[Hashable, float]] = {}

    @property
    def interval_s(self) -> float | None:
        """How often to look; None: never."""
        # No longer than any system can wait.
        return min(3600.0, *self.timeouts_s.values()) / 8 if self.timeouts_s else None

    def timeout_s(self, worker: WorkerId) -> float | None:
        """How long a worker may take; None for any time."""
        return self.timeouts_s.get(worker.kind)

    def forget(self) -> None:
        """Start anew: what was owed until now is settled."""
        self._since.clear()

    def overdue(self, owing: Mapping[WorkerId, Hashable], now: float) -> WorkerId | None:
        """The first worker whose progress has not changed for its time-out, or None.

        Args:
            owing: by worker that owes something, what changes when it makes progress.
            now: in seconds.
        """
        since = self._since
        self._since = {
            worker: since[worker] if worker in since and since[worker][0] == state else (state, now)
            for worker, state in owing.items()
        }
        for worker, (_, start) in self._since.items():
            timeout_s = self.timeout_s(worker)
            if timeout_s is not None and now - start >= timeout_s:
                return worker
        return None


def at_work(
    schedule: Schedule, counters: npt.NDArray[np.int64], owner: Sequence[int]
) -> dict[WorkerId, Hashable]:
    """What each worker owes while a run is on, with what shows its progress.

    An executor owes a step where there is an action, and an observation where its round is open.
    Actors owe an action to every observation that its executor has announced for sure: in the midst
    of a step it may have kept some back (`_rounds/gathering.py`). An actor that has none in hand
    owes nothing as long as another has: that one will take what is left, or is the one that hangs.

    Args:
        schedule: the schedule, over shared words.
        counters: a row per executor, then one per actor.
        owner: for each environment, the index of its executor.
    """
    steps, phases = list(schedule.steps), list(schedule.phase)  # type: ignore[call-overload]
    own: dict[int, list[int]] = {}
    busy = set()
    waiting = []
    for env, executor in enumerate(owner):
        own.setdefault(executor, []).append(steps[env])
        if phases[env] == Phase.READY:
            if not counters[executor, Counter.AT]:
                waiting.append((env, steps[env]))
        elif phases[env] != Phase.TAKEN and (
            phases[env] == Phase.ANSWERED or schedule.is_open(schedule.position(env)[0])
        ):
            busy.add(executor)
    owing: dict[WorkerId, Hashable] = {
        WorkerId("executor", index): (int(counters[index, Counter.AT]), *own[index])
        for index in sorted(busy)
    }
    actors = counters[len(own) :]
    in_hand = actors[:, Counter.AT].any()
    for index, row in enumerate(actors):
        if row[Counter.AT]:
            owing[WorkerId("actor", index)] = (int(row[Counter.AT]), int(row[Counter.EVENTS]))
        elif waiting and not in_hand:
            owing[WorkerId("actor", index)] = (*waiting, int(actors[:, Counter.EVENTS].sum()))
    return owing
