"""How a recipe begins: options first, then the imports that take seconds, and never in silence.

Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from support.errors import RecipeError, explaining, what_users_can_mend
from support.launch import is_first, is_first_here
from support.old_runs import newest_step, refuse_busy
from support.options import Options, RunOptions, parse_options
from support.output_dir import refuse_unwritable, remedy_for
from support.outputs import Output
from support.wandb_variables import check_wandb_variables

__all__ = ["SCREENS", "announce", "begin", "check_task_or_exit", "parse_or_exit"]

Given = TypeVar("Given")

# Any of them says that there is a screen, or what to take in its place.
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")

_BEGAN_S = time.monotonic()
_FIRST_TELLS_S = 5.0


def begin(options_class: type[Options], description: str | None) -> Options:
    """The options of the command line; says what happens next, here and in the collector.

    To be called before torch is imported. Meanwhile the servers that workers are forked from begin
    to import it too.

    Args:
        options_class, description: see `parse_options`.

    Raises:
        SystemExit: if options are wrong, or only help was asked for.
    """
    options = parse_or_exit(lambda: _checked(parse_options(options_class, description)))
    if options.resume is not None:
        announce(f"going on with the run in {options.resume}{_progress(options.resume)}")
    announce("importing torch and torchrl, here and in the workers' servers")
    try:
        from torchrl_hts import keep_servers  # which knows gymnasium
    except ImportError as error:  # another TorchRL, say
        _exit_with(error)

    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    opened.enter_context(keep_servers())
    check_task_or_exit(options)
    return options


def check_task_or_exit(options: RunOptions) -> None:
    """Find out whether there is what options name; ends the process with a message if not."""
    try:
        with explaining(options.task):
            options.check_start()
    except what_users_can_mend() as error:
        _exit_with(error)


def _checked(options: Options) -> Options:
    """The options, if nothing stands against the run that would be told much later."""
    directory, resumes = options.resume or options.output_dir, options.resume is not None
    if directory is not None:
        refuse_busy(directory, resumes=resumes)
    refuse_unwritable(directory or Path("runs"), remedy_for(resumes=resumes))
    check_wandb_variables(options)
    return options


def parse_or_exit(
    parse: Callable[[], Given], wait: Callable[[float], object] = time.sleep
) -> Given:
    """What a command line says; ends the process with a message if that makes no sense.

    Of several learners the first on each machine has the help. It has the message, and others
    where it goes on. From now on the package says what it is doing too, and TorchRL only warns.

    Args:
        parse: reads the command line.
        wait: for so many seconds; if the first ends too the launcher ends this one meanwhile.
    """
    said = io.StringIO()
    with contextlib.ExitStack() as quiet:
        if not is_first_here():
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
            quiet.enter_context(contextlib.redirect_stderr(said))
        try:
            given = parse()
            _check_mujoco_gl()
            _draw_without_a_screen()
        except RecipeError as error:
            _exit_with(error, wait)
        except SystemExit as end:  # of argparse
            if end.code and not is_first_here():
                wait(_FIRST_TELLS_S)
                sys.__stderr__.write(said.getvalue())
            raise
    logger = logging.getLogger("torchrl_hts")
    logger.addHandler(_Announcing())
    logger.setLevel(logging.INFO)
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # TorchRL reads it when it is imported
    return given


def _check_mujoco_gl() -> None:
    """Refuse a MUJOCO_GL that MuJoCo can't be imported with, and so TorchRL can't."""
    if not os.environ.get("MUJOCO_GL"):
        return
    try:
        import mujoco  # noqa: F401
    except ModuleNotFoundError:  # not installed: nobody reads the variable
        return
    except Exception as error:
        raise RecipeError(
            f"MuJoCo can't draw with MUJOCO_GL={os.environ['MUJOCO_GL']} here "
            f"({type(error).__name__}: {error}): give another, egl, osmesa or glfw, or none"
        ) from error


def _draw_without_a_screen() -> None:
    """Let pygame draw pictures where there is no screen, without looking for one.

    SDL, which it is made on, else writes of a missing XDG_RUNTIME_DIR as if that were an error.
    """
    if sys.platform == "linux" and not any(map(os.environ.get, SCREENS)):
        os.environ["SDL_VIDEODRIVER"] = "dummy"


def _exit_with(error: Exception, wait: Callable[[float], object] = time.sleep) -> NoReturn:
    """End the process with a message, if no other one on this machine has it."""
    if not is_first_here():
        wait(_FIRST_TELLS_S)
    sys.exit(f"error: {error}")


def announce(text: str) -> None:
    """Print a line at once, on stderr, with the seconds since the start; the first learner does."""
    if is_first():
        said = f"{time.monotonic() - _BEGAN_S:5.1f} s  {text}"
        print(said, file=Output(sys.stderr), flush=True)


class _Announcing(logging.Handler):
    """Announces what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        announce(record.getMessage())


def _progress(directory: Path) -> str:
    """How far a run has come, by the name of its newest checkpoint."""
    step = newest_step(directory)
    if step is None:
        return ", which has no checkpoint yet"
    return f", from its checkpoint at {step:,} steps"
