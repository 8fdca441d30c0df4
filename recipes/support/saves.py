"""Who else is told that a checkpoint is complete; Ray Train, for one (recipes/ray_train.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.metrics import Row

__all__ = ["WHEN_SAVED"]

# Called on every learner, at the same moment of the run, with the run's directory and the newest
# row of its metrics, which is empty on all learners but the first.
WHEN_SAVED: list[Callable[[Path, Row], None]] = []
