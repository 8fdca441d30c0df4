"""What a collector has counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrl_hts.invariance import InvariantSizes
from torchrl_hts.storage import Counter

__all__ = ["Statistics", "summarise"]


@dataclass(frozen=True)
class Statistics:
    """A snapshot of a collector's counters since the iteration began.

    Times are in seconds; a share is of the time that the workers of that kind have lived, all
    together, or of the time that has passed for the learner.

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
        actor_busy_share: share of their time that actors gathered, inferred and scattered.
        actor_batches: forward passes.
        mean_actor_batch_size: rows per forward pass, padding left out.
        padding_share: share of the rows run that were padding.
        episodes: episodes that ended.
        executor_restarts: executors that failed and were replaced.
        actor_restarts: actors, likewise.
        invariant_sizes: the batch sizes that were measured to agree bitwise on this machine.
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
    actor_batches: int
    mean_actor_batch_size: float
    padding_share: float
    episodes: int
    executor_restarts: int
    actor_restarts: int
    invariant_sizes: InvariantSizes


def summarise(
    counters: npt.NDArray[np.int64],
    num_executors: int,
    *,
    frames: int,
    frames_loaded: int,
    rounds: int,
    elapsed_s: float,
    learner_waiting_s: float,
    restarts: Mapping[str, int],
    invariant_sizes: InvariantSizes,
) -> Statistics:
    """Make a snapshot of the workers' counters: one row per executor, then one per actor.

    Args:
        restarts: workers that were replaced, by kind.
    """
    executors = counters[:num_executors].sum(0)
    actors = counters[num_executors:].sum(0)
    batches, rows = int(actors[Counter.EVENTS]), int(actors[Counter.ROWS])
    return Statistics(
        frames=frames,
        rounds=rounds,
        elapsed_s=elapsed_s,
        frames_per_second=(frames - frames_loaded) / elapsed_s if elapsed_s else 0.0,
        learner_waiting_s=learner_waiting_s,
        learner_waiting_share=learner_waiting_s / elapsed_s if elapsed_s else 0.0,
        executor_busy_share=_share(executors, Counter.BUSY_NS),
        executor_action_waiting_share=_share(executors, Counter.WAITING_NS),
        executor_round_waiting_share=_share(executors, Counter.ROUND_WAITING_NS),
        actor_busy_share=_share(actors, Counter.BUSY_NS),
        actor_batches=batches,
        mean_actor_batch_size=rows / batches if batches else 0.0,
        padding_share=1 - rows / int(actors[Counter.PADDED_ROWS]) if rows else 0.0,
        episodes=int(executors[Counter.RESETS]),
        executor_restarts=restarts.get("executor", 0),
        actor_restarts=restarts.get("actor", 0),
        invariant_sizes=invariant_sizes,
    )


def _share(words: npt.NDArray[np.int64], part: Counter) -> float:
    times = (Counter.BUSY_NS, Counter.WAITING_NS, Counter.ROUND_WAITING_NS)
    total = sum(int(words[time]) for time in times)
    return int(words[part]) / total if total else 0.0
