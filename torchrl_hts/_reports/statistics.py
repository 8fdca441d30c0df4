"""What a collector has counted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._processes.linux import read_system_file
from torchrl_hts._reports.statistics_table import table
from torchrl_hts._rounds.shared_memory import Counter, SharedMemory

__all__ = ["Statistics", "WorkerStatistics", "summarise"]


@dataclass(frozen=True)
class WorkerStatistics:
    """Where the time of one worker went, in seconds, and what memory it has to itself.

    Attributes:
        busy_s: an executor stepped and reset environments; an actor read rows, inferred, and wrote
            rows.
        action_waiting_s: an executor had nothing to do until an action came.
        round_waiting_s: an executor had nothing to do until a round opened.
        observation_waiting_s: an actor had nothing to do until an observation came.
        gathering_s: an actor had observations, and waited for more to infer with them.
        cpu_s: processor time that it used, of all its threads, since the first run began. That of
            looking for messages is left out: where every worker has a core, it doesn't sleep at
            once.
        events: steps of an executor, forward passes of an actor.
        private_bytes: memory that no other process shares; None if it wasn't asked for, the worker
            has ended, or the system doesn't tell (it takes Linux's /proc).
    """

    busy_s: float
    action_waiting_s: float
    round_waiting_s: float
    observation_waiting_s: float
    gathering_s: float
    cpu_s: float
    events: int
    private_bytes: int | None


@dataclass(frozen=True)
class Statistics:
    """A snapshot of a collector's counters since the iteration began.

    Printed it is a table of ten lines. Times are in seconds; a share is of the time that the
    workers of that kind have lived, all together, or of the time that has passed for the learner.

    Attributes:
        frames: frames handed to the learner, with those before a state was loaded.
        rounds: batches handed to the learner, likewise.
        elapsed_s: time since the first call of the iterator of this collector.
        frames_per_second: frames of this collector over elapsed time.
        learner_waiting_s: time that the iterator waited for a round to be full.
        learner_waiting_share: the same as a share of the elapsed time.
        executor_busy_share: share of their time that executors stepped and reset environments.
        executor_action_waiting_share: share that they had nothing to do until an action came.
        executor_round_waiting_share: share that they had nothing to do until a round opened.
        actor_busy_share: share of their time that actors read rows, inferred, and wrote rows.
        actor_observation_waiting_share: share that they had nothing to do.
        actor_gathering_share: share that they had observations, and waited for more.
        actor_batches: forward passes.
        mean_actor_batch_size: rows per forward pass, padding left out.
        padding_share: share of the rows run that were padding.
        episodes: episodes that ended.
        executor_restarts: executors that failed and were replaced.
        actor_restarts: actors, likewise.
        invariant_sizes: the batch sizes that were measured to agree bitwise on this machine.
        batch_sizes: number of forward passes by their rows, padding left out.
        step_times: number of environment steps by their time: of those under a key's seconds, and
            not under half as many. A step that ends an episode includes the reset; one that played
            in the background counts from the end of the step before it in the same executor.
        workers: by name, ``"executor 0"``, ..., ``"actor 0"``, ...
        shared_bytes: size of the memory that all processes share: slots, parameters and counters.
        learner_private_bytes: memory of the learner's process that no other shares, whatever it is
            used for; None if it wasn't asked for, or the system doesn't tell.
    """

    frames: int
    rounds: int
    elapsed_s: float
    frames_per_second: float
    learner_waiting_s: float
    learner_waiting_share: float
    executor_busy_share: float
    executor_action_waiting_share: float
    executor_round_waiting_share: float
    actor_busy_share: float
    actor_observation_waiting_share: float
    actor_gathering_share: float
    actor_batches: int
    mean_actor_batch_size: float
    padding_share: float
    episodes: int
    executor_restarts: int
    actor_restarts: int
    invariant_sizes: InvariantSizes
    batch_sizes: Mapping[int, int]
    step_times: Mapping[float, int]
    workers: Mapping[str, WorkerStatistics]
    shared_bytes: int
    learner_private_bytes: int | None

    def __str__(self) -> str:
        return table(self)


def summarise(
    memory: SharedMemory,
    num_executors: int,
    pids: Mapping[str, int],
    *,
    of_memory: bool,
    frames: int,
    collected: int,
    rounds: int,
    elapsed_s: float,
    learner_waiting_s: float,
    restarts: Mapping[str, int],
    invariant_sizes: InvariantSizes,
) -> Statistics:
    """Make a snapshot of the workers' counters: one row per executor, then one per actor.

    Args:
        memory: the shared memory.
        num_executors: so many of its rows are executors'.
        pids: of the workers that are there, by name.
        of_memory: look how much memory they, and this process, have to themselves.
        frames, collected, rounds, elapsed_s, learner_waiting_s, invariant_sizes: what the
            learner's side knows.
        restarts: workers that were replaced, by kind.
    """
    counters = memory.counters
    executors = counters[:num_executors].sum(0)
    actors = counters[num_executors:].sum(0)
    waiting, gathering = (_share(actors, c) for c in (Counter.WAITING_NS, Counter.GATHERING_NS))
    batches, rows = int(actors[Counter.EVENTS]), int(actors[Counter.ROWS])
    padded = int(actors[Counter.PADDED_ROWS])  # actors write it after the rows
    return Statistics(
        frames=frames,
        rounds=rounds,
        elapsed_s=elapsed_s,
        frames_per_second=collected / elapsed_s if elapsed_s else 0.0,
        learner_waiting_s=learner_waiting_s,
        learner_waiting_share=learner_waiting_s / elapsed_s if elapsed_s else 0.0,
        executor_busy_share=_share(executors, Counter.BUSY_NS),
        executor_action_waiting_share=_share(executors, Counter.WAITING_NS),
        executor_round_waiting_share=_share(executors, Counter.ROUND_WAITING_NS),
        actor_busy_share=_share(actors, Counter.BUSY_NS),
        actor_observation_waiting_share=waiting - gathering,
        actor_gathering_share=gathering,
        actor_batches=batches,
        mean_actor_batch_size=rows / batches if batches else 0.0,
        padding_share=max(0.0, 1 - rows / padded) if padded else 0.0,
        episodes=int(executors[Counter.RESETS]),
        executor_restarts=restarts.get("executor", 0),
        actor_restarts=restarts.get("actor", 0),
        invariant_sizes=invariant_sizes,
        batch_sizes=_counts(memory.histograms[num_executors:]),
        step_times={2**b / 1e9: n for b, n in _counts(memory.histograms[:num_executors]).items()},
        workers=_workers(counters, num_executors, pids if of_memory else {}),
        shared_bytes=memory.layout.num_bytes,
        learner_private_bytes=private_bytes(os.getpid()) if of_memory else None,
    )


def _counts(histograms: npt.NDArray[np.int64]) -> dict[int, int]:
    """How many are in each bucket that is not empty, all workers together."""
    total = histograms.sum(0)
    return {bucket: int(total[bucket]) for bucket in np.flatnonzero(total).tolist()}


def _workers(
    counters: npt.NDArray[np.int64], num_executors: int, pids: Mapping[str, int]
) -> dict[str, WorkerStatistics]:
    found = {}
    for row, words in enumerate(counters):
        steps = row < num_executors
        name = f"executor {row}" if steps else f"actor {row - num_executors}"
        waiting_s = float(words[Counter.WAITING_NS] / 1e9)
        gathering_s = float(words[Counter.GATHERING_NS] / 1e9)
        found[name] = WorkerStatistics(
            busy_s=float(words[Counter.BUSY_NS] / 1e9),
            action_waiting_s=waiting_s if steps else 0.0,
            round_waiting_s=float(words[Counter.ROUND_WAITING_NS] / 1e9),
            observation_waiting_s=0.0 if steps else waiting_s - gathering_s,
            gathering_s=gathering_s,
            cpu_s=float(words[Counter.CPU_NS] / 1e9),
            events=int(words[Counter.EVENTS]),
            private_bytes=private_bytes(pids[name]) if name in pids else None,
        )
    return found


def private_bytes(pid: int) -> int | None:
    """Memory that a process shares with no other; None where the system doesn't tell.

    Example:
        >>> import os
        >>> own = private_bytes(os.getpid())
        >>> own is None or own > 1_000_000
        True
    """
    try:
        lines = read_system_file(f"/proc/{pid}/smaps_rollup").splitlines()
    except OSError:  # not Linux, or the process has ended
        return None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def _share(words: npt.NDArray[np.int64], part: Counter) -> float:
    times = (Counter.BUSY_NS, Counter.WAITING_NS, Counter.ROUND_WAITING_NS)
    total = sum(int(words[time]) for time in times)
    return int(words[part]) / total if total else 0.0
