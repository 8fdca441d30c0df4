"""What a run has written down of itself, against what it writes when it is had once more."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.checkpoints import Checkpoints, of_another_version
from support.errors import RecipeError
from support.trained import TrainedRun, read_values

__all__ = ["Digests"]

_BY_THE_CLOCK = ("speed/", "time/")


class Digests:
    """The rows of a run's metrics.csv and its saved parameters, and whether a replay has the same.

    Args:
        run: the run.
        after: environment steps from which on it is had once more.

    Attributes:
        differences: what was found to differ, a sentence each, with the steps after which it does.
        compared: what was found to be equal bit for bit, by name.
    """

    def __init__(self, run: TrainedRun, after: int) -> None:
        self.differences: list[tuple[int, str]] = []
        self.compared: dict[str, int] = {"rows of metrics.csv": 0, "sets of parameters": 0}
        self._rows = {step: row for step, row in _rows(run.directory).items() if step > after}
        self._parameters: dict[int, tuple[str, Mapping[str, Tensor]]] = {}
        checkpoints = Checkpoints(run.directory / "checkpoints", 1)
        for path in checkpoints.paths():
            if int(path.stem[5:]) > after and (state := checkpoints.load(path)) is not None:
                self._parameters[int(path.stem[5:])] = (path.name, _policy_in(path, state))
        if (run.directory / "best.pt").exists():
            best = read_values(run.directory)
            if best.step is not None and best.step > after:
                self._parameters.setdefault(best.step, (best.file.name, best.tensors))

    def is_before_a_row(self, step: int) -> bool:
        """Whether the first that there is to compare comes after so many steps."""
        first = min((*self._rows, *self._parameters), default=None)
        return first is not None and first > step

    def check_parameters(self, step: int, policy: nn.Module) -> None:
        """Compare the parameters after a number of environment steps."""
        self._compare(step, policy.state_dict())

    def _compare(self, step: int, own: Mapping[str, Any]) -> None:
        name, saved = self._parameters.get(step, ("", {}))
        if not saved:
            return
        wrong = [
            key
            for key, value in saved.items()
            if key not in own or not torch.equal(own[key].cpu(), value)
        ]
        if wrong:
            said = f"after {step:,} steps {wrong[0]} is not that of {name}"
            self.differences.append((step, said))
        else:
            self.compared["sets of parameters"] += 1

    def check_written(self, directory: Path) -> None:
        """Compare what was written into another directory: rows, and parameters of its end."""
        checkpoints = Checkpoints(directory / "checkpoints", 1)
        for path in checkpoints.paths():
            step = int(path.stem[5:])
            if step in self._parameters and (state := checkpoints.load(path)) is not None:
                self._compare(step, _policy_in(path, state))
        for step, row in _rows(directory).items():
            saved = self._rows.get(step)
            if saved is None:
                continue
            wrong = [name for name in row if row[name] != saved.get(name)]
            if wrong:
                was, now = saved.get(wrong[0]), row[wrong[0]]
                said = f"after {step:,} steps {wrong[0]} was {was} and is {now}"
                self.differences.append((step, said))
            else:
                self.compared["rows of metrics.csv"] += 1

    def verdict(self) -> str:
        """What was compared and found to be equal."""
        found = [f"{name} ({count})" for name, count in self.compared.items() if count]
        if not found:
            return "not compared: the run has written nothing down of these steps"
        return f"the same as in the run, bit for bit: {', '.join(found)}"


def _policy_in(path: Path, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The policy's parameters in a checkpoint.

    Raises:
        RecipeError: if it is of a version that keeps them elsewhere.
    """
    try:
        found = dict(state["parts"]["collector"]["policy_state_dict"])
    except (KeyError, TypeError, ValueError) as error:
        raise of_another_version(path, error) from error
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _rows(directory: Path) -> dict[int, dict[str, str]]:
    """The rows of metrics.csv by their steps, but for what a clock measures; only whole ones."""
    file = directory / "metrics.csv"
    if not file.exists():
        return {}
    try:
        text = file.read_text()
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {
            int(float(row["step"])): {
                name: value for name, value in row.items() if not name.startswith(_BY_THE_CLOCK)
            }
            for row in csv.DictReader(lines, strict=True)
        }
    except (KeyError, ValueError, TypeError, AttributeError, csv.Error) as error:
        raise RecipeError(f"{file} is damaged ({error}): put the file back as it was") from error
