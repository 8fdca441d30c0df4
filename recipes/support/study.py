"""What the delay study compares, its options, and the pictures and the table of its cells."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from support.classic import TASKS
from support.errors import RecipeError
from support.flags import counted, integer, positive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "ALGORITHMS",
    "VARIANTS",
    "Variant",
    "curves_of",
    "draw",
    "load",
    "parse",
    "picture",
    "read_cell",
    "table",
]


@dataclass(frozen=True)
class Variant:
    """A lag, and where gradients are taken.

    Attributes:
        critic_delayed: False takes the critic's gradients, and the values that advantages are made
            of, at its newest parameters, wherever the policy's are taken.
    """

    label: str
    lag: int
    gradient_at: Literal["behaviour", "newest"]
    critic_delayed: bool = True


VARIANTS = {
    "lag0": Variant("lag 0", 0, "behaviour"),
    "lag1-delayed": Variant("lag 1, delayed", 1, "behaviour"),
    "lag1-newest": Variant("lag 1, newest", 1, "newest"),
    "lag1-split": Variant("lag 1, policy delayed", 1, "behaviour", False),
    "lag2-delayed": Variant("lag 2, delayed", 2, "behaviour"),
    "lag2-newest": Variant("lag 2, newest", 2, "newest"),
    "lag2-split": Variant("lag 2, policy delayed", 2, "behaviour", False),
}
# A column of a picture each: where gradients are taken, at each lag. At lag 0 it is all the same.
RULES = {
    "all delayed": ("lag0", "lag1-delayed", "lag2-delayed"),
    "newest": ("lag0", "lag1-newest", "lag2-newest"),
    "policy delayed": ("lag0", "lag1-split", "lag2-split"),
}
COLORS = ("black", "C0", "C1")  # of lags
ALGORITHMS = ("a2c", "ppo")

Panel = tuple[str, float]  # environment and multiplier of the learning rate
Results = dict[str, dict[Panel, dict[str, list[dict[str, Any]]]]]  # algorithm, panel, variant


def load(directory: Path) -> Results:
    """The cells of a directory, algorithms and panels in a fixed order, variants as they come.

    Raises:
        RecipeError: if there are none, or those of one panel differ in their number of steps.
    """
    cells = [(file, read_cell(file)) for file in sorted(directory.glob("*.json"))]
    if not cells:
        raise RecipeError(f"there are no cells in {directory}: run the study first")
    cells.sort(key=lambda each: ([*TASKS].index(each[1]["env"]), each[1]["multiplier"]))
    results: Results = {name: {} for name in ALGORITHMS}
    frames: dict[tuple[str, Panel], int] = {}
    for file, cell in cells:
        algorithm, panel = cell["algorithm"], (cell["env"], cell["multiplier"])
        results[algorithm].setdefault(panel, {}).setdefault(cell["variant"], []).append(cell)
        expected = frames.setdefault((algorithm, panel), cell["total_frames"])
        if cell["total_frames"] != expected:
            raise RecipeError(
                f"{file} has {cell['total_frames']} steps, others like it {expected}: keep them "
                "in directories of their own"
            )
    return {algorithm: panels for algorithm, panels in results.items() if panels}


def read_cell(file: Path) -> dict[str, Any]:
    """What a cell's file holds.

    Raises:
        RecipeError: if it is damaged.
    """
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{file} is damaged ({error}): delete it to run the cell") from error


def curves_of(cells: Sequence[dict[str, Any]]) -> np.ndarray:
    """Returns ``[cells, points]``; NaN before the first episode has ended."""
    curves = np.array([cell["returns"] for cell in cells], float)
    for cell, curve in zip(cells, curves, strict=True):
        steps, known = np.array(cell["steps"]), ~np.isnan(curve)
        if known.any():
            curve[:] = np.interp(steps, steps[known], curve[known], left=np.nan)
    return curves


def draw(algorithm: str, panels: dict[Panel, dict[str, list[dict[str, Any]]]], file: Path) -> None:
    """Draws return against steps."""
    picture(algorithm, panels).savefig(file, dpi=120)


def picture(algorithm: str, panels: dict[Panel, dict[str, list[dict[str, Any]]]]) -> Figure:
    """Return against steps: a row per environment and learning rate, a column per rule."""
    from matplotlib.figure import Figure  # half a second that the start does without
    from matplotlib.ticker import EngFormatter, MaxNLocator

    there = {name for cells in panels.values() for name in cells}
    rules = [rule for rule, names in RULES.items() if there & set(names[1:])] or [*RULES][:1]
    # No wider than a page of the documentation, where text keeps its size.
    size = (1 + 2.4 * len(rules), 1 + 2.1 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(panels), len(rules), squeeze=False, sharex="row", sharey="row")
    lines: dict[str, Any] = {}
    for row, (panel, cells) in zip(grid, panels.items(), strict=True):
        for axes, rule in zip(row, rules, strict=True):
            for name in (name for name in RULES[rule] if name in cells):
                label = f"lag {VARIANTS[name].lag}"
                lines[label] = _draw_line(axes, cells[name], COLORS[VARIANTS[name].lag])
            axes.set_title(rule, fontsize="medium")
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.grid(alpha=0.3)
        title = panel_title(panel).replace(" \u00d7 ", "\u00a0\u00d7\u00a0")
        row[0].set_ylabel("\n".join(wrap(title, 19)))
    for axes in grid[-1]:
        axes.set_xlabel("environment steps")
    counts = sorted({len(each) for cells in panels.values() for each in cells.values()})
    seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    figure.legend(
        lines.values(),
        lines.keys(),
        title=f"{algorithm.upper()}: mean return ({seeds} seeds); band: \u00b1 standard error",
        loc="outside upper center",
        ncols=len(lines),
    )
    return figure


def _draw_line(axes: Any, cells: Sequence[dict[str, Any]], color: str) -> Any:
    curves = curves_of(cells)
    steps, mean = cells[0]["steps"], curves.mean(0)
    (line,) = axes.plot(steps, mean, color=color)
    if len(curves) > 1:
        error = curves.std(0, ddof=1) / len(curves) ** 0.5
        axes.fill_between(steps, mean - error, mean + error, color=color, alpha=0.1, linewidth=0)
    return line


def table(results: Results) -> str:
    """Final returns in Markdown: mean over the seeds, standard error, number of seeds."""

    def entry(cells: Sequence[dict[str, Any]]) -> str:
        values = [cell["final_return"] for cell in cells if cell["final_return"] is not None]
        if len(values) < 2:
            return f"{values[0]:.1f} (1)" if values else ""
        error = stdev(values) / len(values) ** 0.5
        return f"{fmean(values):.1f} \u00b1 {error:.1f} ({len(values)})"

    lines = [
        ["environment", "algorithm", *(variant.label for variant in VARIANTS.values())],
        ["---"] * (2 + len(VARIANTS)),
    ]
    for algorithm, panels in results.items():
        for panel, cells in panels.items():
            entries = [entry(cells.get(name, [])) for name in VARIANTS]
            lines.append([panel_title(panel), algorithm.upper(), *entries])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def panel_title(panel: Panel) -> str:
    """Such as ``"CartPole-v1, learning rate x 2.5"``."""
    env, multiplier = panel
    return TASKS[env].title + (f", learning rate \u00d7 {multiplier:g}" if multiplier != 1 else "")


def parse(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        RecipeError: for a name that isn't known.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {"envs": [*TASKS], "algorithms": [*ALGORITHMS], "variants": [*VARIANTS]}
    for name, names in known.items():
        parser.add_argument(
            f"--{name}", nargs="+", default=names, metavar="NAME", help=f"of {', '.join(names)}"
        )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=integer,
        default=[0, 1, 2, 3, 4],
        metavar="SEED",
        help="(default: 0 1 2 3 4)",
    )
    parser.add_argument(
        "--learning-rates",
        nargs="+",
        type=positive,
        default=[1.0, 2.5],
        metavar="MULTIPLIER",
        help="multiples of each setting's own (default: 1 2.5)",
    )
    parser.add_argument("--total-frames", type=counted, help="by default each environment's own")
    parser.add_argument("--jobs", type=counted, default=1, help="cells at a time (default: 1)")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("runs/delay_study"),
        help="where cells and pictures lie (default: runs/delay_study)",
    )
    parser.add_argument("--plot", action="store_true", help="train nothing, draw what is there")
    given = parser.parse_args(arguments)
    for name, names in known.items():
        unknown = [each for each in getattr(given, name) if each not in names]
        if unknown:
            raise RecipeError(
                f"--{name}: {', '.join(unknown)} is unknown; known are {', '.join(names)}"
            )
    return given
