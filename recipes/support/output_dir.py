"""The directory that a run writes to: which it is, and that no other run writes to it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from support.errors import RecipeError
from support.launch import is_own, own_run
from support.old_runs import busy, moved, refuse_old_run
from support.options import RunOptions

if TYPE_CHECKING:
    from torchrl_hts import World

__all__ = [
    "Claim",
    "check_files",
    "check_shared",
    "claim_output_dir",
    "find_output_dir",
    "refuse_unwritable",
    "remedy_for",
]

_REMEDY = "give another --output-dir"
_REMEDY_IF_RESUMED = "make it writable, or go on with a copy of it"


def find_output_dir(recipe: str, options: RunOptions) -> tuple[Path, bool]:
    """The output directory, and whether there is a run in it to go on with.

    Args:
        recipe: its name, which is also that of the directory under ``runs``.
        options: of the run.
    """
    if options.resume is not None:
        return options.resume, True
    if options.output_dir is not None:
        return options.output_dir, is_own(options.output_dir)
    name = options.task.rpartition("/")[2]
    runs = Path("runs", recipe)
    own = own_run(runs, name)
    if own is not None:
        return own, True
    return runs / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}", False


def remedy_for(*, resumes: bool) -> str:
    """What to do about an output directory that can't be written to.

    Args:
        resumes: whether the run in it is to be gone on with.
    """
    return _REMEDY_IF_RESUMED if resumes else _REMEDY


def refuse_unwritable(directory: Path, remedy: str) -> None:
    """Raise RecipeError if a directory can't be made, or written to.

    Args:
        directory: need not exist.
        remedy: what to do.
    """
    places = [path for path in (directory, *directory.parents) if os.path.exists(path)]
    if not places:  # where this process is was deleted
        raise _not_writable(directory, errno.ENOENT, remedy)
    place = places[0]
    if not place.is_dir():
        raise _not_writable(directory, errno.ENOTDIR, remedy)
    if not os.access(place, os.W_OK | os.X_OK):
        raise _not_writable(directory, errno.EACCES, remedy)


def check_files(**files: Path | None) -> None:
    """Refuse files that can't be written, by the names of the options that name them.

    Raises:
        RecipeError: names the option.
    """
    for name, file in files.items():
        if file is not None:
            refuse_unwritable(file.parent, f"give another --{name}")
            if file.is_dir():
                raise RecipeError(f"--{name} {file} is a directory: name a file in it")


class Claim:
    """A directory that others keep out of, until this is closed.

    Args:
        directory: the directory.
        lock: its file that is locked.
    """

    def __init__(self, directory: Path, lock: TextIO) -> None:
        self.directory = directory
        self._lock = lock

    def holds(self) -> bool:
        """Whether it is where it was, and no other in its place; others may come in if not."""
        try:
            found = os.stat(self._lock.name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(self._lock.fileno()))

    def check(self) -> None:
        """Raise RecipeError if it is not."""
        if not self.holds():
            raise moved(self.directory)

    def close(self) -> None:
        """Let others in."""
        self._lock.close()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def claim_output_dir(directory: Path, *, holds_own_run: bool, resumes: bool = False) -> Claim:
    """Make the directory, and keep other runs out of it until what is returned is closed.

    Args:
        directory: the directory.
        holds_own_run: whether a run that is in it already is this one.
        resumes: whether the directory was given by ``--resume``, for what to do.

    Raises:
        RecipeError: if it can't be written to, or another run is at work in it, or has ended there.
    """
    remedy = remedy_for(resumes=resumes)
    refuse_unwritable(directory, remedy)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise _not_writable(directory, error.errno, remedy) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not holds_own_run:
            refuse_old_run(directory)  # one that has ended since the options were read
    except BlockingIOError:
        lock.close()
        raise busy(directory, resumes=resumes) from None
    except OSError as error:
        lock.close()
        raise _not_writable(directory, error.errno, remedy) from error
    except BaseException:
        lock.close()
        raise
    return Claim(directory, lock)


def check_shared(directory: Path, world: World) -> None:
    """Refuse a run whose learners have directories of one name that are not the same one.

    Args:
        directory: that the first learner has claimed.
        world: the learners, all of which call this.

    Raises:
        RecipeError: on every learner; names one that has another directory.
    """
    if world.size == 1:
        return
    # Of a name that nobody has looked for: NFS remembers for a while what was not there.
    word = world.gather(uuid.uuid4().hex[:12])[0]
    file = directory / f".learners-{word}"
    failure = _attempt(file.touch) if world.is_first else None
    if (failed := world.gather(failure)[0]) is not None:
        raise RecipeError(f"{directory} can't be written to: {failed}")
    found = world.gather(_is_there(file))
    if world.is_first:
        file.unlink(missing_ok=True)
    if not all(found):
        raise RecipeError(
            f"learner {found.index(False)} has another {directory} than the first: all machines "
            "need to share the --output-dir"
        )


def _attempt(act: Callable[[], object]) -> str | None:
    try:
        act()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


def _is_there(file: Path) -> bool:
    """Whether a file that another machine has just made is there.

    Its directory may be as new, and this machine remember that there was none: to make it is to
    find out.
    """
    if file.exists():
        return True
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    there = file.exists()
    if not there:
        with contextlib.suppress(OSError):  # it isn't empty
            file.parent.rmdir()
    return there


def _not_writable(directory: Path, number: int | None, remedy: str) -> RecipeError:
    return RecipeError(f"{directory} can't be written to: {os.strerror(number or 0)}; {remedy}")
