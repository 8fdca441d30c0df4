"""Which of a run's processes this is.

Nothing here imports torch.
"""

from __future__ import annotations

import os

from torchrl_hts._world.launch import place

__all__ = ["is_first"]


def is_first() -> bool:
    """Whether this process is the one that prints and writes: rank 0, or alone."""
    try:
        own = place(os.environ)
    except ValueError:  # World says what is wrong
        return True
    return own is None or own.rank == 0
