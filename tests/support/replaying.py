"""Replays of runs, as users ask for them."""

from __future__ import annotations

import importlib
import io
from contextlib import redirect_stderr, redirect_stdout

import pytest
import script_paths  # noqa: F401  so that the recipes are found
import torch
from support.errors import exit_with


def replay(*flags: object, code: int = 0) -> str:
    """Replay in this process; returns what was printed."""
    module = importlib.import_module("replay")
    threads = torch.get_num_threads()
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed), pytest.raises(SystemExit) as end:
            exit_with(lambda: module.main(module.parse([*map(str, flags)])))
    finally:
        torch.set_num_threads(threads)
    assert end.value.code == code, printed.getvalue()
    return printed.getvalue()
