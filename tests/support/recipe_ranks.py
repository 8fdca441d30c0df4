"""Recipes as the ranks of one run, in processes that are forked with everything imported."""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from ranks import run_ranks
from script_paths import RECIPES  # noqa: F401  so that the scripts are found
from warm_recipes import popen


class Deed(NamedTuple):
    """What a rank does to itself at a certain moment.

    Attributes:
        number: the signal that it sends itself; 0: it raises a ValueError.
        rank: which one does.
        where: before which method, such as ``"support.run:Run.record"``.
        count: at which call of it.
    """

    number: int
    rank: int
    where: str
    count: int

    def prepare(self) -> None:
        """Have it done, if this is the rank."""
        if int(os.environ["RANK"]) != self.rank:
            return
        module, _, path = self.where.partition(":")
        owner, name = path.split(".")
        kind = getattr(importlib.import_module(module), owner)
        does: Callable[..., Any] = getattr(kind, name)
        calls = 0

        def deed(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.count:
                if not self.number:
                    raise ValueError(f"{path} has failed")
                os.kill(os.getpid(), self.number)
            return does(*args, **kwargs)

        setattr(kind, name, deed)


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
        directory: where it runs.
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
        os.chdir(directory)
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
