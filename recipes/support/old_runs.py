"""Runs that a directory holds already: one that is at work there, and one that has ended.

Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from support.errors import RecipeError, quoted

__all__ = ["busy", "refuse_busy", "refuse_old_run"]


def refuse_busy(directory: Path) -> None:
    """Raise RecipeError if another run is at work in a directory, which need not exist."""
    try:
        with (directory / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: learners ask at once
    except BlockingIOError:
        raise busy(directory) from None
    except OSError:  # no lock yet, or whoever claims the directory says what is wrong
        return


def busy(directory: Path) -> RecipeError:
    """The error of a directory in which another run is at work."""
    return RecipeError(
        f"another run is at work in {directory}: wait for its end, or give another --output-dir"
    )


def refuse_old_run(directory: Path) -> None:
    """Raise RecipeError if a directory holds a run already."""
    if (directory / "config.json").exists():
        raise RecipeError(
            f"{directory} holds a run already: go on with it by --resume {quoted(directory)}, or "
            "give another --output-dir"
        )
