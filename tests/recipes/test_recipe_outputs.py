"""Runs whose output nobody reads any more go on, and end, as others do."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import ppo_cartpole
import pytest
from recipe_metrics import NAMES
from recipe_runs import CARTPOLE, assert_equal_runs, run
from script_paths import RECIPES
from support.display import Display
from support.errors import exit_with
from support.options import parse_options
from support.outputs import Output
from support.run import Run

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

FLAGS = f"{CARTPOLE} --total-frames 640 --log-interval 64 --eval-interval 128"
ROW = {"step": 64.0, **dict.fromkeys(sorted(NAMES), 1.0)}


@pytest.mark.usefixtures("nothing_left")
def test_a_run_that_is_stopped_together_with_who_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``2>&1 | tee``: Ctrl-C ends both."""
    run(FLAGS, "--output-dir", str(tmp_path / "whole"))
    stopped = tmp_path / "stopped"
    ours, theirs = os.pipe()
    calls = 0
    record = Run.record

    def stopping(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            os.close(ours)
            signal.raise_signal(signal.SIGINT)
        record(*args)  # type: ignore[arg-type]

    flags = [*FLAGS.split()[1:], "--output-dir", str(stopped)]
    options = parse_options(ppo_cartpole.Options, None, flags)
    with monkeypatch.context() as patch, open(theirs, "w") as output:
        patch.setattr(Run, "record", stopping)
        with redirect_stdout(output), redirect_stderr(output), pytest.raises(SystemExit) as end:
            exit_with(lambda: ppo_cartpole.train(options))
    assert end.value.code == 130
    run("ppo_cartpole.py", "--resume", str(stopped))
    assert_equal_runs(tmp_path / "whole", stopped)


def test_what_is_printed_where_nobody_reads_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    """As with ``play.py RUN_DIR | head -1``: it goes on, as if somebody did."""
    printed = []

    def main() -> int:
        for number in range(3):
            print("an episode", flush=True)  # noqa: T201
            printed.append(number)
        print("kept back until the end")  # noqa: T201
        return 3

    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w") as stdout, redirect_stdout(stdout), pytest.raises(SystemExit) as end:
        exit_with(main)
    assert end.value.code == 3
    assert printed == [0, 1, 2]
    assert capsys.readouterr().err.count("standard output is lost (Broken pipe)") == 1


@pytest.mark.parametrize("opened", [os.pipe, pty.openpty], ids=["pipe", "terminal"])
def test_a_display_that_is_lost_says_so_once_and_fails_nobody(
    opened: Callable[[], tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = opened()
    with open(theirs, "w") as stdout:  # which would fail too if it had kept anything back
        monkeypatch.setattr(sys, "stdout", stdout)
        with Display(640) as display:
            os.close(ours)
            for _ in range(2):
                display.show(ROW, at_once=True)
                display.say("stopped")
        print("so may others write", file=stdout)
        monkeypatch.undo()
    said = capsys.readouterr().err
    assert said.count("standard output is lost") == (opened is os.pipe)  # the terminal has both


def test_what_is_not_lost_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(640) as display:
        display.say("the one")
    print("the other", file=Output(sys.stderr))
    assert capsys.readouterr() == ("the one\n", "the other\n")


PRINTS = """
import subprocess, sys
from support.errors import RecipeError, exit_with

def main():
    print("told", flush=True)
    subprocess.run(["sh", "-c", "echo told also && echo and here >&2"], check=True)
    if "fails" in sys.argv:
        raise RecipeError("what is wrong")
    return 3

exit_with(main)
"""


def without(closed: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with standard descriptors closed."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable]
    return subprocess.run(
        [*shell, *command], capture_output=True, text=True, cwd=RECIPES, timeout=200, check=False
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_script_without_standard_streams(closed: str, fails: bool) -> None:
    """What is said goes nowhere, or where it would without."""
    done = without(closed, "-c", PRINTS, *["fails"] * fails)
    assert done.returncode == (1 if fails else 3)
    assert done.stdout == ("" if ">&-" in closed.split() else "told\ntold also\n")
    error = "error: what is wrong\n" * fails
    assert done.stderr == ("" if "2>&-" in closed else f"and here\n{error}")


def test_a_run_without_standard_streams(tmp_path: Path) -> None:
    """As one is detached over ssh."""
    run(FLAGS, "--output-dir", str(tmp_path / "whole"))
    done = without("<&- >&- 2>&-", *FLAGS.split(), f"--output-dir={tmp_path / 'detached'}")
    assert done.returncode == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "detached")
