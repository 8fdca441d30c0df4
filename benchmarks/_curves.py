"""Learning curves of `learning.py`: the files they are in, a picture, and a table."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure

LABELS = {
    "hts": "HTSCollector, lag 1",
    "hts-lag0": "HTSCollector, lag 0",
    "multi-sync": "MultiSyncCollector",
    "parallel": "Collector with ParallelEnv",
}
COLUMNS = ["elapsed_s", "steps", "episodes", "return_mean"]
WINDOW = 100  # episodes that means are over; fewer reach no goal

Curve = dict[str, list[float]]


def read(file: Path) -> Curve:
    """A contender's columns."""
    with file.open(newline="") as rows:
        table = list(csv.DictReader(rows))
    return {column: [float(row[column]) for row in table] for column in COLUMNS}


def draw(
    title: str, curves: dict[str, list[Curve]], evaluations: dict[str, list[Curve]], file: Path
) -> None:
    """Return against minutes, and against steps, a line for each seed; evaluations as dots."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for index, (name, of_seeds) in enumerate(curves.items()):
        for style, suffix, found in (
            ("-", "", of_seeds),
            ("o:", ", played greedily", evaluations.get(name, [])),
        ):
            label: str | None = LABELS[name] + suffix
            for curve in found:
                minutes = [seconds / 60 for seconds in curve["elapsed_s"]]
                left.plot(minutes, curve["return_mean"], style, color=f"C{index}", label=label)
                right.plot(curve["steps"], curve["return_mean"], style, color=f"C{index}")
                label = None  # once
    left.set(xlabel="minutes", ylabel=f"mean of the last {WINDOW} episodes")
    right.set(xlabel="environment steps")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=120)


def reached(curve: Curve, goal: float, least_episodes: int) -> tuple[float, float] | None:
    """Minutes and steps until a mean over so many episodes came to a goal; None if it never did."""
    for seconds, steps, episodes, mean in zip(*(curve[name] for name in COLUMNS), strict=True):
        if episodes >= least_episodes and mean >= goal:
            return seconds / 60, steps
    return None


def over(values: Sequence[float], form: str) -> str:
    """The value of one seed; of several the mean and the standard deviation."""
    if len(values) < 2:
        return "".join(format(value, form) for value in values) or "-"
    return f"{fmean(values):{form}} ± {stdev(values):{form}}"


def print_table(
    curves: dict[str, list[Curve]], evaluations: dict[str, list[Curve]], goals: Sequence[float]
) -> None:
    """Minutes and final mean of each contender, and when it reached the goals, in Markdown.

    Of several seeds each cell has the mean and the standard deviation.
    """
    heads = ["collector", "minutes", "steps/s", "at the end", "after as long as the first took"]
    heads += [f"minutes (steps) to {goal:g}" for goal in goals]
    if evaluations:
        heads += [f"to {goal:g}, played greedily" for goal in goals] + ["each evaluation"]
    print(f"| {' | '.join(heads)} |")
    print(f"| {' | '.join('---' for _ in heads)} |")
    first = next(iter(curves.values()))
    for name, of_seeds in curves.items():
        cells = [
            LABELS[name],
            over([curve["elapsed_s"][-1] / 60 for curve in of_seeds], ".1f"),
            over([curve["steps"][-1] / curve["elapsed_s"][-1] for curve in of_seeds], ".0f"),
            over([curve["return_mean"][-1] for curve in of_seeds], ".2f"),
            over(_within(of_seeds, first), ".2f"),
        ]
        cells += [_reached(of_seeds, goal, WINDOW) for goal in goals]
        if played := evaluations.get(name):
            cells += [_reached(played, goal, 0) for goal in goals]
            each = [", ".join(f"{mean:.1f}" for mean in one["return_mean"]) for one in played]
            cells.append("; ".join(each))
        cells += ["-"] * (len(heads) - len(cells))
        print(f"| {' | '.join(cells)} |")


def _within(curves: Sequence[Curve], limits: Sequence[Curve]) -> list[float]:
    """What curves had when those of a limit, of the same seeds, were over."""
    found = []
    for curve, limit in zip(curves, limits, strict=True):
        pairs = zip(curve["elapsed_s"], curve["return_mean"], strict=True)
        found += [mean for at, mean in pairs if at <= limit["elapsed_s"][-1]][-1:]
    return found


def _reached(curves: Sequence[Curve], goal: float, least_episodes: int) -> str:
    """Minutes and steps to a goal, and how many seeds came there, if not all."""
    found = [each for curve in curves if (each := reached(curve, goal, least_episodes))]
    if not found:
        return "never"
    minutes, steps = zip(*found, strict=True)
    some = f", {len(found)} of {len(curves)} seeds" if len(found) < len(curves) else ""
    return f"{over(minutes, '.1f')} ({over(steps, ',.0f')}){some}"
