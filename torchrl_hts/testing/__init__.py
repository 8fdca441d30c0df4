"""Checks that users can run on their own machine, environments and policies.

The first trains for some rounds over a grid of actors, executors and injected delays, and compares
every batch and the final parameters by their bits (I7)::

    python -m torchrl_hts.testing determinism
"""

from __future__ import annotations

from torchrl_hts.testing.checks import TASKS, RandomDelay, Task, digest, train
from torchrl_hts.testing.spaces import spaces_of

__all__ = ["TASKS", "RandomDelay", "Task", "digest", "spaces_of", "train"]
