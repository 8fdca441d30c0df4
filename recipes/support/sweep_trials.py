"""A trial of `optuna_sweep.py`: a run of the recipe, watched until it ends or is stopped."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from support.errors import RecipeError
from support.old_runs import refuse_busy
from support.signals import StopSignals
from support.sweeps import Sweep, logged

if TYPE_CHECKING:
    from optuna import Trial

__all__ = ["FailedError", "run_trial"]

LOOK_EVERY_S = 1.0  # at what a run has logged


class FailedError(Exception):
    """A run that had begun has failed."""


def run_trial(
    trial: Trial, sweep: Sweep, directory: Path, arguments: list[str], signals: StopSignals
) -> float | None:
    """Run the recipe and tell Optuna what it logs; returns the last value, None if it was stopped.

    Raises:
        RecipeError: if it doesn't begin, or logs no value.
        FailedError: if it fails later.
        KeyboardInterrupt: if a signal has come.
    """
    refuse_busy(directory)  # by a run that has outlived its sweep
    has_begun = (directory / "config.json").exists
    flags = [*sweep.flags(trial.params), *arguments, f"--output-dir={directory}"]
    if has_begun():
        flags = [f"--resume={directory}"]
    command = [sys.executable, str(sweep.program), *flags]
    output = directory.with_suffix(".log")
    rows: list[float] = []
    values: list[float] = []
    code, stops = None, False
    with output.open("a") as log:
        # In a session of its own: of a Ctrl-C it learns by the one SIGTERM below.
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            while code is None and not stops:
                try:
                    code = process.wait(LOOK_EVERY_S)
                except subprocess.TimeoutExpired:
                    code = None
                if code != 0 and signals.number is not None:  # the run may have got it as well
                    raise KeyboardInterrupt
                before, rows = len(values), logged(directory, sweep.metric)
                values = [value for value in rows if math.isfinite(value)]
                for number, value in enumerate(values[before:], before + 1):
                    trial.report(value, number)
                    stops = stops or (code is None and trial.should_prune())
        finally:
            process.terminate()  # it saves a checkpoint; nothing if it has ended
            process.wait()
    if stops:
        return None
    said = ["", *output.read_text().splitlines()][-1]
    if not has_begun():
        raise RecipeError(f"the recipe has not begun ({output}): {said.removeprefix('error: ')}")
    if code:
        raise FailedError(said)
    if rows and not values:
        raise FailedError(f"no {sweep.metric} of it is a finite number")
    if not values:
        raise RecipeError(f"{directory} has ended and has logged no {sweep.metric}")
    return values[-1]
