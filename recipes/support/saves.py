"""Who else is told of what a run does: Ray Train (recipes/ray_train.py), and recipes/replay.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tensordict import TensorDictBase

from support.metrics import Row
from torchrl_hts import HTSCollector

__all__ = ["ON_BATCH", "ON_BEGIN", "WHEN_SAVED", "batches_of"]

# That a checkpoint is complete: called on every learner, at the same moment of the run, with the
# run's directory and the newest row of its metrics, which is empty on all learners but the first.
WHEN_SAVED: list[Callable[[Path, Row], None]] = []

# Of each batch, before anything is done with it. A run that is watched so is one that is had once
# more, and plays no evaluations.
ON_BATCH: list[Callable[[HTSCollector, TensorDictBase], None]] = []

# Of a collector, before its first batch.
ON_BEGIN: list[Callable[[HTSCollector], None]] = []


def batches_of(collector: HTSCollector) -> Iterator[TensorDictBase]:
    """Yield a collector's batches, after those were told who want to be."""
    for begin in ON_BEGIN:
        begin(collector)
    for batch in collector:
        for tell in ON_BATCH:
            tell(collector, batch)
        yield batch
