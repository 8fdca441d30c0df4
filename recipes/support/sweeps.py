"""Sweep files of Weights & Biases, and what a run has logged of the metric that a sweep is after.

Nothing here imports torch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.errors import RecipeError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

__all__ = ["Sweep", "logged", "read_sweep"]


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    Attributes:
        program: the recipe, as the file names it.
        metric: what is to become large, or small.
        direction: ``"maximize"`` or ``"minimize"``.
        warmup: values of the metric that no trial is stopped before.
        fixed: options that are the same in each trial, by name.
        space: what the others are drawn from.
    """

    program: Path
    metric: str
    direction: str
    warmup: int
    fixed: Mapping[str, Any]
    space: Mapping[str, BaseDistribution]

    def flags(self, chosen: Mapping[str, Any]) -> list[str]:
        """The recipe's flags for what was drawn."""
        named = {**self.fixed, **chosen}
        return [
            f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"
            for name, value in named.items()
        ]


def read_sweep(file: Path) -> Sweep:
    """Read a sweep file.

    Raises:
        RecipeError: if it can't be read, or says what is not known here.
    """
    import yaml

    try:
        content = yaml.safe_load(file.read_text())
        program, metric = Path(content["program"]), content["metric"]["name"]
        direction = content["metric"].get("goal", "minimize")
        warmup = int((content.get("early_terminate") or {}).get("min_iter", 1))
        given = {name: dict(how) for name, how in content["parameters"].items()}
        fixed = {name: how["value"] for name, how in given.items() if "value" in how}
        space = {name: _distribution(how) for name, how in given.items() if name not in fixed}
    except OSError as error:
        raise RecipeError(f"the sweep file {file} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise RecipeError(
            f"{file} is not a sweep file that is understood here ({said}): it needs a program, "
            "a metric with name and goal, and parameters, each with a value, with values, or with "
            "min, max and the distribution uniform, int_uniform or log_uniform_values"
        ) from error
    if direction not in ("maximize", "minimize"):
        raise RecipeError(f"{file}: the metric's goal is maximize or minimize, and not {direction}")
    if not program.exists():
        raise RecipeError(
            f"{file} names {program}, which is not here: call this in the folder that holds it"
        )
    return Sweep(program, metric, direction, warmup, fixed, space)


def _distribution(how: Mapping[str, Any]) -> BaseDistribution:
    """What a parameter is drawn from; where it has no name the numbers tell, as at W&B."""
    from optuna import distributions as known

    kind = how.get("distribution")
    if "values" in how and kind in (None, "categorical"):
        return known.CategoricalDistribution(how["values"])
    low, high = how["min"], how["max"]
    if kind is None:
        kind = "int_uniform" if isinstance(low, int) and isinstance(high, int) else "uniform"
    if kind == "int_uniform":
        return known.IntDistribution(low, high)
    if kind not in ("uniform", "log_uniform_values"):
        raise ValueError(f"unknown distribution {kind}")
    return known.FloatDistribution(low, high, log=kind == "log_uniform_values")


def logged(directory: Path, metric: str) -> list[float]:
    """What a run has logged of a metric so far, NaN and infinite values too.

    Raises:
        RecipeError: if it logs others alone, or what is no number.
    """
    file = directory / ("evaluations.csv" if metric.startswith("evaluation/") else "metrics.csv")
    text = file.read_text() if file.exists() else ""
    rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))  # without half a line
    try:
        return [float(row[metric]) for row in rows]
    except KeyError:
        raise RecipeError(
            f"{file} has no {metric}, which the sweep is after; it has "
            f"{', '.join(rows.fieldnames or ())}"
        ) from None
    except (ValueError, TypeError, csv.Error) as error:
        raise RecipeError(
            f"{file} has as {metric} what is no number ({error}): put the file back as it was, or "
            "name another metric in the sweep file and give another --output-dir"
        ) from error
