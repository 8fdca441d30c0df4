"""What a collector recorded, as arrays and as a trace for Perfetto (or chrome://tracing).

Axes: E events.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_hts._rounds.event_rings import Activity, read_ring
from torchrl_hts._rounds.shared_memory import Array, SharedMemory
from torchrl_hts.errors.checks import check_integer

__all__ = ["Timeline", "check_path", "read_timeline"]

_TRACES = (".json", ".json.gz")
_PICTURES = (".png", ".svg", ".pdf")
_PICTURED_ROUNDS = 4

_NAMES = {
    Activity.STEP: "step",
    Activity.RESET: "reset",
    Activity.ACTION_WAIT: "wait for an action",
    Activity.ROUND_WAIT: "wait for a round",
    Activity.INFER: "infer",
    Activity.OBSERVATION_WAIT: "wait for observations",
    Activity.LEARN: "learn",
    Activity.BATCH_WAIT: "wait for a batch",
}
_OF_A_ROUND = (Activity.STEP, Activity.INFER, Activity.LEARN)


@dataclass(frozen=True, repr=False)
class Timeline:
    """Who did what when.

    Attributes:
        events: by name, ``"learner"``, ``"actor 0"``, ..., ``"executor 0"``, ...: an array of
            records in the order in which they ended. Its fields are ``began`` and ``ended`` (ns of
            a monotonic clock), ``activity`` (see `torchrl_hts._rounds.event_rings.Activity`),
            ``number``, ``env`` (among the environments of all learners), ``rows`` and ``padded``.
        sync_interval: alpha.
        lag: how many updates the behaviour parameters are behind.
    """

    events: Mapping[str, Array]
    sync_interval: int
    lag: int

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}: {len(events)} events" for name, events in self.events.items())
        return f"{type(self).__name__}({counts})"

    def rounds(self, events: Array) -> Array:
        """The round of each event; -1 for those of none (waiting for an action or observations).

        Args:
            events: ``[E]`` records, as in `events` or from `of`.

        Returns:
            ``[E]`` integers.
        """
        rounds = events["number"].copy()
        steps = events["activity"] == Activity.STEP
        rounds[steps] //= self.sync_interval
        for activity in (Activity.ACTION_WAIT, Activity.OBSERVATION_WAIT):
            rounds[events["activity"] == activity] = -1
        return rounds

    def of(self, activity: Activity) -> Array:
        """The events of one activity, of all workers.

        Args:
            activity: which, such as ``Activity.STEP``.

        Returns:
            ``[E]`` records, worker by worker.

        Raises:
            ValueError: if it is none of `Activity`.
        """
        if activity not in [*Activity]:
            known = ", ".join(f"Activity.{each.name}" for each in Activity)
            raise ValueError(f"activity must be one of {known}; got {activity!r}")
        return np.concatenate([e[e["activity"] == activity] for e in self.events.values()])

    def last(self, num_rounds: int) -> Timeline:
        """What happened since the first environment began one of the last rounds.

        Args:
            num_rounds: how many of the rounds that were handed out are kept, at least 1.

        Raises:
            TypeError: if it is no integer.
            ValueError: if it is below 1.
        """
        num_rounds = check_integer("num_rounds", num_rounds)
        handed_out = self.of(Activity.BATCH_WAIT)["number"]
        first = (int(handed_out[-1]) if len(handed_out) else 0) - num_rounds + 1
        steps = _since_a_state_was_loaded(self.of(Activity.STEP))
        begin = steps["began"][self.rounds(steps) >= first].min(initial=np.iinfo(np.int64).max)
        kept = {name: events[events["ended"] > begin] for name, events in self.events.items()}
        return Timeline(kept, self.sync_interval, self.lag)

    def write(self, path: str | os.PathLike[str], num_rounds: int | None = None) -> None:
        """Write a trace or a picture; see `HTSCollector.timeline`.

        Args:
            path: its name ends in ``.json`` or ``.json.gz`` for a trace, in ``.png``, ``.svg`` or
                ``.pdf`` for a picture.
            num_rounds: how many of the last rounds are shown. By default a trace has all that was
                kept, and a picture a few.

        Raises:
            TypeError: for a `num_rounds` that is no integer.
            ValueError: if the name ends in anything else, or for a `num_rounds` below 1.
            ImportError: if a picture is asked for and matplotlib is missing.
        """
        file = check_path(path)
        if file.name.endswith(_TRACES):
            shown = self if num_rounds is None else self.last(num_rounds)
            open_ = gzip.open if file.suffix == ".gz" else open
            with open_(file, "wt", encoding="utf-8") as stream:
                stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                stream.write(",\n".join(json.dumps(event) for event in shown.trace_events()))
                stream.write("\n]}\n")
        else:
            from torchrl_hts._reports.picture import draw

            draw(self.last(_PICTURED_ROUNDS if num_rounds is None else num_rounds), file)

    def trace_events(self) -> Iterator[dict[str, Any]]:
        """The events in Chrome's Trace Event Format: names of processes and threads, then slices.

        Kinds of workers are shown as processes, workers as threads. Times are in microseconds since
        the first event.
        """
        zero = min((int(e["began"].min()) for e in self.events.values() if len(e)), default=0)
        kinds: dict[str, int] = {}
        for tid, (worker, events) in enumerate(self.events.items(), 1):
            kind = worker.split()[0]
            if kind not in kinds:
                kinds[kind] = len(kinds) + 1
                yield _named("process_name", kinds[kind], 0, kind)
            yield _named("thread_name", kinds[kind], tid, worker)
            for event, round_ in zip(events, self.rounds(events).tolist(), strict=True):
                activity = Activity(int(event["activity"]))
                name = _NAMES[activity]
                yield {
                    "name": f"{name}, round {round_}" if activity in _OF_A_ROUND else name,
                    "cat": activity.name.lower(),
                    "ph": "X",
                    "ts": (int(event["began"]) - zero) / 1e3,
                    "dur": (int(event["ended"]) - int(event["began"])) / 1e3,
                    "pid": kinds[kind],
                    "tid": tid,
                    "args": self._details(activity, event, round_),
                }

    def _details(self, activity: Activity, event: Any, round_: int) -> dict[str, int]:
        details = {} if round_ < 0 else {"round": round_}
        if activity in (Activity.STEP, Activity.RESET):
            details["environment"] = int(event["env"])
        if activity == Activity.STEP:
            details["step"] = int(event["number"]) % self.sync_interval
        if activity == Activity.INFER:
            details |= {"rows": int(event["rows"]), "rows with padding": int(event["padded"])}
        if activity in _OF_A_ROUND:
            details["policy version"] = round_  # theta_j acts in round j, and is what is learned at
        if activity == Activity.LEARN:
            details["makes policy version"] = round_ + self.lag + 1
        return details


def _since_a_state_was_loaded(steps: Array) -> Array:
    """The steps of each environment from where its numbers last went back, if they did."""
    kept = []
    for env in np.unique(steps["env"]):
        own = steps[steps["env"] == env]
        back = np.flatnonzero(np.diff(own["number"].astype(np.int64)) < 0)
        kept.append(own[back[-1] + 1 :] if len(back) else own)
    return np.concatenate(kept) if kept else steps


def check_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file that can be written.

    Raises:
        ValueError: if its ending is none of those known.
    """
    file = Path(path)
    if not file.name.endswith(_TRACES + _PICTURES):
        raise ValueError(
            f"a timeline's file must end in one of {', '.join(_TRACES + _PICTURES)}; "
            f"got {file.name!r}"
        )
    return file


def read_timeline(memory: SharedMemory, num_executors: int) -> Timeline:
    """What the rings of all workers hold; they may be writing.

    Args:
        memory: the shared memory.
        num_executors: so many of the workers, the first ones, are executors; the others actors.
    """
    layout = memory.layout
    num_actors = layout.num_workers - num_executors
    names = {"learner": layout.num_workers}
    names |= {f"actor {index}": num_executors + index for index in range(num_actors)}
    names |= {f"executor {index}": index for index in range(num_executors)}
    events = {name: read_ring(memory, worker) for name, worker in names.items()}
    for name, records in events.items():
        of_one = np.isin(records["activity"], [Activity.STEP, Activity.RESET])
        kinds = records.dtype
        wide = [(each, np.int64 if each == "env" else kinds[each]) for each in kinds.names or ()]
        events[name] = records = records.astype(wide)  # there are more of all learners together
        records["env"][of_one] += layout.first_env
    return Timeline(events, layout.sync_interval, layout.lag)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
