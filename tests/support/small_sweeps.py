"""A sweep over a recipe that is over at once."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

__all__ = ["Sweeps"]

# What happens to it is said by its option x.
RECIPE = """
import argparse, os, signal
from pathlib import Path

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
parser = argparse.ArgumentParser()
for name in ("--output-dir", "--resume"):
    parser.add_argument(name, type=Path)
parser.add_argument("--x", type=int)
parser.add_argument("--more", action=argparse.BooleanOptionalAction)
given = parser.parse_args()
directory = given.resume or given.output_dir
assert given.resume or (given.more is False and not directory.exists())


def write(*values):
    directory.mkdir(exist_ok=True)
    lines = ["step,evaluation/return_mean", *(f"{n},{v}" for n, v in enumerate(values)), "9,"]
    (directory / "config.json").write_text("{}")
    (directory / "evaluations.csv").write_text("\\n".join(lines))  # the last without its end


def wait():
    signal.sigwait([signal.SIGTERM])
    (directory / "saved").touch()
    raise SystemExit(143)


if given.resume:
    write(7, 8)
elif given.x == 0:  # worse than others
    write(0)
    wait()
elif given.x == 1:
    write(1)
    raise SystemExit("error: it has diverged")
elif given.x == 2:
    raise SystemExit("error: it can't begin")
elif given.x == 3:  # the sweep is interrupted
    write(7)
    os.kill(os.getppid(), signal.SIGTERM)
    wait()
elif given.x == 5:
    write("nan", "inf", "-inf")
elif given.x == 6:
    write("abc")
else:
    write("nan", given.x, given.x + 1, "inf")
"""
SWEEP = """
program: {program}
metric: {{name: evaluation/return_mean, goal: maximize}}
parameters:
  more: {{value: false}}
  x: {{min: 0, max: 9}}
"""


class Sweeps:
    """A sweep of the recipe above; what is drawn is set beforehand."""

    def __init__(self, directory: Path) -> None:
        recipe, self.file = directory / "recipe.py", directory / "sweep.yaml"
        recipe.write_text(RECIPE)
        self.file.write_text(SWEEP.format(program=recipe))
        self.directory = directory / "sweep"
        self.directory.mkdir()

    def study(self, arguments: tuple[str, ...] = ()) -> Any:
        from support.sweep_study import open_study
        from support.sweeps import read_sweep

        return open_study(self.directory, read_sweep(self.file), arguments, 0)

    def space(self) -> Any:
        """What x is drawn from."""
        from support.sweeps import read_sweep

        return read_sweep(self.file).space["x"]

    def run(self, trials: int, *arguments: str) -> int:
        module = importlib.import_module("optuna_sweep")
        options = argparse.Namespace(
            sweep=self.file,
            output_dir=self.directory,
            trials=trials,
            sweep_seed=0,
            arguments=list(arguments),
        )
        code: int = module.main(options)
        return code

    def draw(self, *values: int) -> None:
        study = self.study()
        for value in values:
            study.enqueue_trial({"x": value})
