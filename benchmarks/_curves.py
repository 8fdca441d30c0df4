"""Learning curves of `learning.py`: the files they are in, a picture, and a table."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

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


def draw(title: str, curves: dict[str, Curve], evaluations: dict[str, Curve], file: Path) -> None:
    """Return against minutes, and against steps; evaluations as dots."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for index, (name, curve) in enumerate(curves.items()):
        minutes = [seconds / 60 for seconds in curve["elapsed_s"]]
        left.plot(minutes, curve["return_mean"], color=f"C{index}", label=LABELS[name])
        right.plot(curve["steps"], curve["return_mean"], color=f"C{index}")
        if (dots := evaluations.get(name)) is not None:
            label = f"{LABELS[name]}, played greedily"
            minutes = [seconds / 60 for seconds in dots["elapsed_s"]]
            left.plot(minutes, dots["return_mean"], "o:", color=f"C{index}", label=label)
            right.plot(dots["steps"], dots["return_mean"], "o:", color=f"C{index}")
    left.set(xlabel="minutes", ylabel=f"mean of the last {WINDOW} episodes")
    right.set(xlabel="environment steps")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=120)


def reached(curve: Curve, goal: float, least_episodes: int) -> str:
    """Minutes and steps until a mean over so many episodes came to a goal."""
    for seconds, steps, episodes, mean in zip(*(curve[name] for name in COLUMNS), strict=True):
        if episodes >= least_episodes and mean >= goal:
            return f"{seconds / 60:.1f} ({steps:,.0f})"
    return "never"


def print_table(
    curves: dict[str, Curve], evaluations: dict[str, Curve], goals: Sequence[float]
) -> None:
    """Minutes and final mean of each contender, and when it reached the goals, in Markdown."""
    heads = ["collector", "minutes", "steps/s", "at the end", "after as long as the first took"]
    heads += [f"minutes (steps) to {goal:g}" for goal in goals]
    if evaluations:
        heads += [f"to {goal:g}, played greedily" for goal in goals] + ["each evaluation"]
    print(f"| {' | '.join(heads)} |")
    print(f"| {' | '.join('---' for _ in heads)} |")
    limit_s = next(iter(curves.values()))["elapsed_s"][-1]
    for name, curve in curves.items():
        seconds, steps, _, means = (curve[column] for column in COLUMNS)
        within = [value for at, value in zip(seconds, means, strict=True) if at <= limit_s]
        cells = [
            LABELS[name],
            f"{seconds[-1] / 60:.1f}",
            f"{steps[-1] / seconds[-1]:.0f}",
            f"{means[-1]:.2f}",
            f"{within[-1]:.2f}" if within else "-",
        ]
        cells += [reached(curve, goal, WINDOW) for goal in goals]
        if (played := evaluations.get(name)) is not None:
            cells += [reached(played, goal, 0) for goal in goals]
            cells.append(", ".join(f"{mean:.1f}" for mean in played["return_mean"]))
        cells += ["-"] * (len(heads) - len(cells))
        print(f"| {' | '.join(cells)} |")
