"""Recipes as the ranks of one run, in processes that are forked with everything imported."""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from deeds import Deed
from ranks import run_ranks
from script_paths import RECIPES  # noqa: F401  so that the scripts are found
from warm_recipes import popen


class Ended(NamedTuple):
    """How a rank has ended.

    Attributes:
        code: its exit code, or the signal that has killed it, negative.
        said: what it has printed.
    """

    code: int
    said: str


def run_recipe(
    size: int,
    arguments: str,
    *more: str,
    deed: Deed | None = None,
    restart: str | None = None,
    directory: Path | None = None,
) -> list[Ended]:
    """Run a recipe in so many ranks; returns how each of them has ended.

    Args:
        arguments: of the command line; the rank stands for ``{rank}``.
        deed: of one of them.
        restart: how often torchrun has started it anew, of a run with a name; None: without.
        directory: where it runs; the rank stands for ``{rank}``.
    """
    torchrun = {"TORCHELASTIC_RUN_ID": "none"}
    if restart is not None:
        torchrun = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": restart}
        torchrun["TORCHELASTIC_MAX_RESTARTS"] = "3"
    outcomes = run_ranks(
        _run_recipe, size, arguments, more, deed, torchrun, directory, timeout_s=250
    )
    ended = []
    for outcome in outcomes:
        killed = outcome.error.removeprefix("ended with ")
        assert outcome.result or killed != outcome.error, outcome.error
        ended.append(outcome.result or Ended(int(killed), ""))
    return ended


def _run_recipe(
    arguments: str,
    more: tuple[str, ...],
    deed: Deed | None,
    torchrun: dict[str, str],
    directory: Path | None,
) -> Ended:
    from support.errors import exit_with
    from support.options import parse_options

    from torchrl_hts import keep_servers

    os.environ.update(torchrun)
    if directory is not None:
        os.chdir(str(directory).replace("{rank}", os.environ["RANK"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    subprocess.Popen = popen  # type: ignore[assignment, misc]
    recipe, *flags = arguments.replace("{rank}", os.environ["RANK"]).split()
    printed = io.StringIO()
    code = 0
    # The servers first: a process had better fork before it has connections.
    with keep_servers(), redirect_stdout(printed), redirect_stderr(printed):
        module = importlib.import_module(Path(recipe).stem)
        if deed is not None:
            deed.prepare()
        try:
            exit_with(
                lambda: module.train(parse_options(module.Options, module.__doc__, [*flags, *more]))
            )
        except SystemExit as end:
            code = int(end.code or 0)
    return Ended(code, printed.getvalue())
