"""Compares runs of recipes: their returns against steps, in a picture and a table.

    python benchmarks/runs.py memory.svg 'with memory=runs/memory-*' 'without=runs/without-*'

Each group is a name and the output directories of its runs, which differ in their seeds: a pattern.
The picture, FILE.svg or FILE.png, shows the mean over a group's runs of what each has last had over
100 training episodes. The band is from the least run to the most. The table is Markdown.
"""

from __future__ import annotations

import argparse
import csv
import glob
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

Curve = dict[int, float]  # return by step


def read(directory: str, name: str) -> tuple[Curve, Curve]:
    """A run's training returns, and what its evaluations gave.

    Raises:
        SystemExit: if there is no such run.
    """
    curves = []
    for file, column in (("metrics", "episode"), ("evaluations", "evaluation")):
        path = Path(directory, f"{file}.csv")
        if not path.exists():
            sys.exit(f"error: {directory}, of {name!r}, holds no run: there is no {path.name}")
        with path.open(newline="") as rows:
            table = [
                (int(row["step"]), row[f"{column}/return_mean"]) for row in csv.DictReader(rows)
            ]
        curves.append({step: float(mean) for step, mean in table if mean not in ("", "nan")})
    return curves[0], curves[1]


def draw(groups: dict[str, list[Curve]], title: str, file: Path) -> None:
    """Return against steps, a line for each group."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curves in groups.items():
        steps = sorted(set.intersection(*map(set, curves)))
        values = [[curve[step] for curve in curves] for step in steps]
        (line,) = axes.plot(steps, list(map(fmean, values)), label=name)
        low, high = list(map(min, values)), list(map(max, values))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="environment steps", ylabel="mean of the last 100 episodes", title=title)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(bottom=min(0.0, axes.dataLim.y0 - 0.03 * axes.dataLim.height))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def spread(values: Sequence[float]) -> str:
    """The median of some runs' returns, with the least and the most."""
    if not values:
        return "-"
    form = ".0f" if max(map(abs, values)) >= 10 else ".2f"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="of the picture")
    parser.add_argument("groups", nargs="+", metavar="NAME=PATTERN", help="of output directories")
    parser.add_argument("--title", default="", help="above the picture")
    parser.add_argument("--goal", type=float, help="also tell when the mean return got there")
    given = parser.parse_args(arguments)
    training: dict[str, list[Curve]] = {}
    heads = ["runs", "last 100 training episodes", "last evaluation", "best evaluation"]
    heads += [f"steps to {given.goal:g}"] if given.goal is not None else []
    lines = [heads, ["---"] * len(heads)]
    for group in given.groups:
        name, _, pattern = group.partition("=")
        directories = sorted(glob.glob(pattern))
        if not directories:
            sys.exit(f"error: {group!r} names no directory: write NAME=PATTERN")
        curves = [read(directory, name) for directory in directories]
        training[name] = [train for train, _ in curves]
        cells = [f"{name}, {len(curves)}"]
        played = [evaluated for _, evaluated in curves if evaluated]
        cells.append(spread([curve[max(curve)] for curve in training[name] if curve]))
        cells.append(spread([evaluated[max(evaluated)] for evaluated in played]))
        cells.append(spread([max(evaluated.values()) for evaluated in played]))
        if given.goal is not None:
            reached = [[s for s, value in c.items() if value >= given.goal] for c in training[name]]
            cells.append(", ".join(f"{min(steps):,}" if steps else "never" for steps in reached))
        lines.append(cells)
    draw(training, given.title, given.file)
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
