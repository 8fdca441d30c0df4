"""What a recipe says to its user instead of a traceback."""

from __future__ import annotations

import errno
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

__all__ = ["InterruptedTwice", "RecipeError", "exit_with", "quoted", "what_users_can_mend"]

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


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a recipe and end the process with its exit code; 1 and a message if it fails."""
    try:
        code = main()
    except what_users_can_mend() as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        name = "a file" if error.filename is None else error.filename
        print(
            f"error: {name} can't be written: {error.strerror}. Checkpoints are whole: make room, "
            "then go on with --resume",
            file=sys.stderr,
        )
        code = 1
    except KeyboardInterrupt as interrupt:
        print(f"error: {str(interrupt) or 'interrupted before the run was saved'}", file=sys.stderr)
        code = 130
    sys.exit(code)


def what_users_can_mend() -> tuple[type[Exception], ...]:
    """Errors whose message is enough."""
    import gymnasium as gym  # not at the top: options are parsed, and refused, without it

    from torchrl_hts import HTSError

    return (RecipeError, ModuleNotFoundError, ValueError, gym.error.Error, HTSError)
