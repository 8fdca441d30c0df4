"""Benchmarks run in this process, which has imported torch and has warm servers already."""

from __future__ import annotations

import importlib
import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import script_paths  # noqa: F401  so that the scripts are found
import torch


def run_script(script: str, *flags: str, code: int | str = 0) -> tuple[str, str]:
    """Run a benchmark to its end, as its command line would.

    Args:
        script: its file's name.
        flags: of its command line.
        code: the exit status, or the last words, to expect.

    Returns:
        What it has written to stdout, and to stderr.
    """
    module = importlib.import_module(Path(script).stem)
    threads = torch.get_num_threads()
    printed, told = io.StringIO(), io.StringIO()
    found: object = None
    try:
        with (
            patch("sys.argv", [script, *flags]),
            redirect_stdout(printed),
            redirect_stderr(told),
        ):
            found = module.main()
    except SystemExit as end:
        found = end.code
    finally:
        torch.set_num_threads(threads)
    assert (found or 0) == code, told.getvalue()
    return printed.getvalue(), told.getvalue()
