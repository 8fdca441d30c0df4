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

__all__ = ["ProgressWatch", "at_work"]


class ProgressWatch:
    """Notices when a worker that owes something has not changed for too long.

    Args:
        timeouts_s: seconds by kind of worker; kinds that are left out may take any time.

    Example:
        >>> watch = ProgressWatch({"executor": 5.0})
        >>> watch.overdue({"executor 0": "step 7", "actor 0": "batch 3"}, now=10.0)
        >>> watch.overdue({"executor 0": "step 8", "actor 0": "batch 3"}, now=14.0)
        >>> watch.overdue({"executor 0": "step 8", "actor 0": "batch 3"}, now=19.0)
        'executor 0'
    """

    def __init__(self, timeouts_s: Mapping[str, float]) -> None:
        self.timeouts_s = dict(timeouts_s)
        self._since: dict[str, tuple[Hashable, float]] = {}

    @property
    def interval_s(self) -> float | None:
        """How often to look; None: never."""
        # No longer than any system can wait.
        return min(3600.0, *self.timeouts_s.values()) / 8 if self.timeouts_s else None

    def timeout_s(self, name: str) -> float | None:
        """How long a worker may take; None for any time."""
        return self.timeouts_s.get(name.partition(" ")[0])

    def forget(self) -> None:
        """Start anew: what was owed until now is settled."""
        self._since.clear()

    def overdue(self, owing: Mapping[str, Hashable], now: float) -> str | None:
        """The first worker whose progress has not changed for its time-out, or None.

        Args:
            owing: by worker that owes something, what changes when it makes progress.
            now: in seconds.
        """
        since = self._since
        self._since = {
            name: since[name] if name in since and since[name][0] == state else (state, now)
            for name, state in owing.items()
        }
        for name, (_, start) in self._since.items():
            timeout_s = self.timeout_s(name)
            if timeout_s is not None and now - start >= timeout_s:
                return name
        return None


def at_work(
    schedule: Schedule, counters: npt.NDArray[np.int64], owner: Sequence[int]
) -> dict[str, Hashable]:
    """What each worker owes while a run is on, by name, with what shows its progress.

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
    owing: dict[str, Hashable] = {
        f"executor {index}": (int(counters[index, Counter.AT]), *own[index])
        for index in sorted(busy)
    }
    actors = counters[len(own) :]
    in_hand = actors[:, Counter.AT].any()
    for index, row in enumerate(actors):
        if row[Counter.AT]:
            owing[f"actor {index}"] = (int(row[Counter.AT]), int(row[Counter.EVENTS]))
        elif waiting and not in_hand:
            owing[f"actor {index}"] = (*waiting, int(actors[:, Counter.EVENTS].sum()))
    return owing
