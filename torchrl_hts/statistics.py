"""What a collector has counted."""

from __future__ import annotations

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
        frames: frames handed to the learner.
        rounds: batches handed to the learner.
        elapsed_s: time since the first call of the iterator.
        frames_per_second: frames over elapsed time.
        learner_waiting_s: time that the iterator waited for a round to be full.
        learner_waiting_share: the same as a share of the elapsed time.
        executor_busy_share: share of their time that executors stepped and reset environments.
        actor_busy_share: share of their time that actors gathered, inferred and scattered.
        actor_batches: forward passes.
        mean_actor_batch_size: rows per forward pass, padding left out.
        padding_share: share of the rows run that were padding.
        episodes: episodes that ended.
        invariant_sizes: the batch sizes that were measured to agree bitwise on this machine.
    """

    frames: int
    rounds: int
    elapsed_s: float
    frames_per_second: float
    learner_waiting_s: float
    learner_waiting_share: float
    executor_busy_share: float
    actor_busy_share: float
    actor_batches: int
    mean_actor_batch_size: float
    padding_share: float
    episodes: int
    invariant_sizes: InvariantSizes


def summarise(
    counters: npt.NDArray[np.int64],
    num_executors: int,
    *,
    frames: int,
    rounds: int,
    elapsed_s: float,
    learner_waiting_s: float,
    invariant_sizes: InvariantSizes,
) -> Statistics:
    """Make a snapshot of the workers' counters: one row per executor, then one per actor."""
    executors = counters[:num_executors].sum(0)
    actors = counters[num_executors:].sum(0)
    batches, rows = int(actors[Counter.EVENTS]), int(actors[Counter.ROWS])
    return Statistics(
        frames=frames,
        rounds=rounds,
        elapsed_s=elapsed_s,
        frames_per_second=frames / elapsed_s if elapsed_s else 0.0,
        learner_waiting_s=learner_waiting_s,
        learner_waiting_share=learner_waiting_s / elapsed_s if elapsed_s else 0.0,
        executor_busy_share=_busy_share(executors),
        actor_busy_share=_busy_share(actors),
        actor_batches=batches,
        mean_actor_batch_size=rows / batches if batches else 0.0,
        padding_share=1 - rows / int(actors[Counter.PADDED_ROWS]) if rows else 0.0,
        episodes=int(executors[Counter.RESETS]),
        invariant_sizes=invariant_sizes,
    )


def _busy_share(words: npt.NDArray[np.int64]) -> float:
    busy = int(words[Counter.BUSY_NS])
    total = busy + int(words[Counter.WAITING_NS])
    return busy / total if total else 0.0
