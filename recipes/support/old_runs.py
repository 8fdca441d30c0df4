"""Runs that a directory holds already: one that is at work there, and one that has ended.

Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from support.configuration import read_config
from support.errors import RecipeError, quoted

__all__ = [
    "busy",
    "checkpoints_in",
    "moved",
    "newest_step",
    "refuse_busy",
    "refuse_old_run",
]


def checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints in a directory, the newest last; files of other names are none."""
    return sorted(path for path in directory.glob("step-*.pt") if path.stem[5:].isdigit())


def newest_step(directory: Path) -> int | None:
    """After how many steps a run has left its newest checkpoint; None if it has none."""
    found = checkpoints_in(directory / "checkpoints")
    return int(found[-1].stem[5:]) if found else None


def refuse_busy(directory: Path, *, resumes: bool = False) -> None:
    """Raise RecipeError if another run is at work in a directory, which need not exist.

    Args:
        directory: the directory.
        resumes: whether the run there is to be gone on with, for what to do.
    """
    try:
        with (directory / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: learners ask at once
    except BlockingIOError:
        raise busy(directory, resumes=resumes) from None
    except OSError:  # no lock yet, or whoever claims the directory says what is wrong
        return


def busy(directory: Path, *, resumes: bool) -> RecipeError:
    """The error of a directory in which another run is at work."""
    other = "" if resumes else ", or give another --output-dir"
    return RecipeError(f"another run is at work in {directory}: wait for its end{other}")


def moved(directory: Path) -> RecipeError:
    """The error of a run whose directory, or the lock in it, is not where it was."""
    return RecipeError(
        f"{directory}, or its .lock, was moved or removed while this run wrote to it: put the "
        f"directory back, or name its new place, and go on with --resume {quoted(directory)}"
    )


def refuse_old_run(directory: Path) -> None:
    """Raise RecipeError if a directory holds a run already, or what is left of one."""
    if (directory / "config.json").exists():
        try:
            read_config(directory / "config.json")
        except OSError as error:
            raise RecipeError(
                f"{directory} holds a run whose config.json can't be read ({error.strerror}): let "
                "it be read, or give another --output-dir"
            ) from error
        except ValueError as error:
            raise RecipeError(
                f"{directory} holds a run whose config.json is damaged ({error}): put that file "
                "back, or give another --output-dir"
            ) from error
        raise RecipeError(
            f"{directory} holds a run already: go on with it by --resume {quoted(directory)}, or "
            "give another --output-dir"
        )
    left = [*checkpoints_in(directory / "checkpoints"), directory / "metrics.csv"]
    if found := next((file for file in left if file.exists()), None):
        raise RecipeError(
            f"{directory} holds what is left of a run, {found.relative_to(directory)}, without its "
            "config.json: put that file back, move the others away, or give another --output-dir"
        )
