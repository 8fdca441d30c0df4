"""Runs that are replayed, or whose policies are played, as users ask for it."""

from __future__ import annotations

import importlib
import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import script_paths  # noqa: F401  so that the recipes are found
import torch
from recipe_runs import CARTPOLE, run
from support.errors import exit_with

# 24 rounds of 64 steps; with a lag of 1 a checkpoint has the environments one round on.
_WALK = (
    f"{CARTPOLE} --env-id walks:Walk-v0 --total-frames 1536 --log-interval 128 --eval-interval 512"
)


def train_a_walk(directory: Path) -> Path:
    """A run that has kept its checkpoints after rounds 15, 19 and 23; returns where it is."""
    run(f"{_WALK} --checkpoint-interval 256", "--output-dir", str(directory / "run"))
    return directory / "run"


def play(*flags: object, code: int = 0) -> str:
    """Play what a run has trained in this process; returns what was printed."""
    return _script("play", flags, code)


def replay(*flags: object, code: int = 0) -> str:
    """Replay in this process; returns what was printed."""
    return _script("replay", flags, code)


def _script(name: str, flags: tuple[object, ...], code: int) -> str:
    module = importlib.import_module(name)
    threads = torch.get_num_threads()
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed), pytest.raises(SystemExit) as end:
            exit_with(lambda: module.main(module.parse([*map(str, flags)])))
    finally:
        torch.set_num_threads(threads)
    assert end.value.code == code, printed.getvalue()
    return printed.getvalue()
