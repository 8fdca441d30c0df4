"""Recipes run as a user runs them."""

from __future__ import annotations

import csv
import importlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from script_paths import RECIPES
from support.errors import exit_with
from support.options import parse_options

CARTPOLE = "ppo_cartpole.py --num-envs 4 --sync-interval 16 --minibatch-size 32 --epochs 1"
CARTPOLE += " --eval-episodes 2"
BY_THE_CLOCK = re.compile(r"speed/|time/")


def start(
    arguments: str,
    *more: str,
    unbuffered: bool = False,
    preexec_fn: Callable[[], None] | None = None,
) -> subprocess.Popen[str]:
    """Start a recipe in a process of its own, its output in one pipe."""
    recipe, *flags = arguments.split()
    return subprocess.Popen(
        [sys.executable, *["-u"] * unbuffered, str(RECIPES / recipe), *flags, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=preexec_fn,
    )


def run(arguments: str, *more: str, code: int = 0) -> str:
    """Run a recipe to its end, in this process; returns what it has printed."""
    recipe, *flags = arguments.split()
    module = importlib.import_module(Path(recipe).stem)
    threads = torch.get_num_threads()
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed), pytest.raises(SystemExit) as end:
            exit_with(
                lambda: module.train(parse_options(module.Options, module.__doc__, [*flags, *more]))
            )
    finally:
        torch.set_num_threads(threads)
    assert end.value.code == code, printed.getvalue()
    return printed.getvalue()


def rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file without what is measured by the clock."""
    with file.open() as lines:
        return [
            {name: value for name, value in row.items() if not BY_THE_CLOCK.match(name)}
            for row in csv.DictReader(lines)
        ]


def assert_equal_runs(one: Path, other: Path) -> None:
    """Bit for bit: the metrics, the evaluations and the parameters."""
    assert rows(one / "metrics.csv") == rows(other / "metrics.csv")
    assert rows(one / "evaluations.csv") == rows(other / "evaluations.csv")
    for name in ("policy.pt", "best.pt"):
        assert (one / name).exists() == (other / name).exists()
        if (one / name).exists():
            states = [torch.load(directory / name) for directory in (one, other)]
            weights, others = [state.get("policy", state) for state in states]
            assert weights.keys() == others.keys()
            assert all(torch.equal(weights[key], others[key]) for key in weights)
    last = [max((d / "checkpoints").iterdir()).name for d in (one, other)]
    assert last[0] == last[1]
