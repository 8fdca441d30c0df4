"""What a recipe says to its user instead of a traceback."""

from __future__ import annotations

import contextlib
import errno
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO, cast

from support.outputs import Output

__all__ = [
    "ONCE_MORE",
    "InterruptedTwice",
    "RecipeError",
    "exit_with",
    "explaining",
    "interrupt_before",
    "quoted",
    "what_users_can_mend",
]

ONCE_MORE = "Make room, then give the same command again"
_RESUME = "Checkpoints are whole: make room, then go on with --resume"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RecipeError(Exception):
    """Something that the user can mend; the message says how."""


def quoted(path: Path) -> str:
    """A path as it is to be typed into a shell."""
    return shlex.quote(str(path))


class InterruptedTwice(KeyboardInterrupt):
    """A second Ctrl-C, SIGTERM or SIGHUP, which ends the run at once.

    Args:
        saved: whether the run had been saved after the first.
    """

    def __init__(self, *, saved: bool) -> None:
        super().__init__(f"interrupted {'after' if saved else 'before'} the run was saved")


def exit_with(main: Callable[[], int], if_full: str = _RESUME) -> NoReturn:
    """Run a recipe and end the process with its exit code; 1 and a message if it fails.

    What it prints may be lost meanwhile; see `Output`.

    Args:
        main: runs it.
        if_full: what to do where a disk is full.
    """
    try:
        output = Output(sys.stdout)
        with contextlib.redirect_stdout(cast(TextIO, output)):
            code = main()
            output.flush()
    except KeyboardInterrupt as interrupt:
        code = _told_interrupt(interrupt)
    except Exception as error:
        if (interrupt := interrupt_before(error)) is not None:
            code = _told_interrupt(interrupt)
        elif isinstance(error, what_users_can_mend()):
            print(f"error: {error}", file=Output(sys.stderr), flush=True)
            code = 1
        elif isinstance(error, OSError):
            code = _told(error, if_full)
        else:
            raise
    sys.exit(code)


def interrupt_before(error: BaseException) -> KeyboardInterrupt | None:
    """The interrupt while which an error came up, as tensordict's contexts raise one on the way."""
    before = error.__context__
    while before is not None and not isinstance(before, KeyboardInterrupt):
        before = before.__context__
    return before


def _told_interrupt(interrupt: KeyboardInterrupt) -> int:
    said = str(interrupt) or "interrupted"
    print(f"error: {said}", file=Output(sys.stderr), flush=True)
    return 130


def _told(error: OSError, if_full: str) -> int:
    """Say of a file that it is in the way; returns the exit code."""
    if error.errno in _NO_SPACE:
        name = "a file" if error.filename is None else error.filename
        said = f"{name} can't be written: {error.strerror}. {if_full}"
    elif error.filename is not None and error.strerror:
        said = f"{error.filename} can't be read or written: {error.strerror}"
    elif isinstance(error, FileNotFoundError) and error.strerror:  # of tempfile, which has looked
        said = f"{error.strerror}: set TMPDIR to a directory that can be written to"
    else:
        raise error
    print(f"error: {said}", file=Output(sys.stderr), flush=True)
    return 1


@contextlib.contextmanager
def explaining(task: str) -> Iterator[None]:
    """Say of what an environment raises while it is made, in one sentence, what to do or where.

    Args:
        task: what it is called.

    Raises:
        RecipeError: in the place of an error that says neither.
    """
    import gymnasium as gym

    try:
        yield
    except gym.error.UnregisteredEnv as error:
        raise RecipeError(
            f"{error} One that a module registers is named MODULE:ID, such as ale_py:ALE/Pong-v5"
        ) from error
    except what_users_can_mend():
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RecipeError(
            f"{task} can't be made: {type(error).__name__}: {error} ({place.filename}, line "
            f"{place.lineno})"
        ) from error


def what_users_can_mend() -> tuple[type[Exception], ...]:
    """Errors whose message is enough."""
    import gymnasium as gym  # not at the top: options are parsed, and refused, without it

    from torchrl_hts import HTSError

    return (RecipeError, ModuleNotFoundError, ValueError, gym.error.Error, HTSError)
