"""What is made of the measurements: a table for each cell of the benchmark, and pictures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from _workloads import TRAININGS, find_workload
from matplotlib.figure import Figure

Record = dict[str, Any]  # one measurement: what was measured, and its result or its error


class Cell(NamedTuple):
    """What contenders are compared on."""

    workload: str
    training: str
    num_envs: int

    @property
    def title(self) -> str:
        return f"{self.workload}, {TRAININGS[self.training].description}"


def cell_of(record: Record) -> Cell:
    """The cell that a measurement belongs to."""
    return Cell(record["workload"], record["training"], record["num_envs"])


def cells_of(records: Iterable[Record]) -> list[Cell]:
    """The cells that have measurements, in the order in which they came."""
    return list(dict.fromkeys(cell_of(record) for record in records))


def speeds_of(records: Iterable[Record], cell: Cell) -> dict[str, list[float]]:
    """Steps per second by contender, the highest median first."""
    speeds: dict[str, list[float]] = {}
    for record in records:
        if cell_of(record) == cell and "steps_per_second" in record:
            speeds.setdefault(record["contender"], []).append(record["steps_per_second"])
    return dict(sorted(speeds.items(), key=lambda item: -statistics.median(item[1])))


def ideal(cell: Cell, parts: dict[str, Any] | None) -> tuple[str, float] | None:
    """The figure that a cell's speeds are shown as a share of, and what it is called."""
    slowest_step_s = find_workload(cell.workload).slowest_step_s
    if slowest_step_s is not None:
        return "of the ideal", cell.num_envs / slowest_step_s
    if parts is not None and "error" not in parts:
        return "of the CPU bound", parts["bound_steps_per_second"]
    return None


def print_table(records: list[Record], cell: Cell, parts: dict[str, Any] | None) -> None:
    """Medians of one cell, fastest first."""
    print(f"\n{cell.title}, {cell.num_envs} environments")
    bound = ideal(cell, parts)
    if parts is not None and "error" not in parts:
        print(
            f"  alone, ms per step: emulator {parts['emulator_s'] * 1e3:.3f}, inference "
            f"{parts['inference_s'] * 1e3:.3f}, learning {parts['learning_s'] * 1e3:.3f}; "
            f"{parts['cores']} cores can do {parts['bound_steps_per_second']:,.0f} steps/s"
        )
    failed = {(r["contender"], r["error"]) for r in records if cell_of(r) == cell and "error" in r}
    for contender, error in sorted(failed):
        print(f"  {contender}: {error}")
    speeds = speeds_of(records, cell)
    others = [statistics.median(s) for name, s in speeds.items() if not name.startswith("hts")]
    header = f"  {'contender':<18}{'steps/s':>10}{'least':>10}{'most':>10}"
    print(header + (f"{bound[0]:>18}" if bound else "") + f"{'of best other':>17}")
    for contender, measured in speeds.items():
        median = statistics.median(measured)
        line = f"  {contender:<18}{median:>10,.0f}{min(measured):>10,.0f}{max(measured):>10,.0f}"
        if bound:
            line += f"{median / bound[1]:>18.0%}"
        if others:
            line += f"{median / max(others):>17.2f}"
        print(line)


def color(contender: str) -> str:
    """Ours stand out."""
    return "tab:orange" if contender.startswith("hts") else "tab:blue"


def draw_bars(records: list[Record], file: Path) -> None:
    """A panel per cell: medians, with lines from the least to the most."""
    cells = cells_of(records)
    speeds = {cell: speeds_of(records, cell) for cell in cells}
    heights = [1.2 + 0.3 * max(1, len(speeds[cell])) for cell in cells]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    grid = figure.subplots(len(cells), 1, squeeze=False, height_ratios=heights)
    for axes, cell in zip(grid[:, 0], cells, strict=True):
        names = [*reversed(speeds[cell])]
        measured = [speeds[cell][name] for name in names]
        medians = [statistics.median(each) for each in measured]
        low = [median - min(each) for median, each in zip(medians, measured, strict=True)]
        high = [max(each) - median for median, each in zip(medians, measured, strict=True)]
        axes.barh(names, medians, xerr=(low, high), color=[color(name) for name in names])
        axes.set_title(f"{cell.title}, {cell.num_envs} environments", fontsize="medium")
        axes.set_xlabel("steps per second")
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=120)


def draw_scaling(records: list[Record], file: Path) -> bool:
    """Steps per second against the number of environments; False if there is but one number."""
    panels = dict.fromkeys((cell.workload, cell.training) for cell in cells_of(records))
    panels = [
        panel
        for panel in panels
        if len({c.num_envs for c in cells_of(records) if (c.workload, c.training) == panel}) > 1
    ]
    if not panels:
        return False
    figure = Figure(figsize=(8, 4 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False)
    for axes, (workload, training) in zip(grid[:, 0], panels, strict=True):
        lines: dict[str, dict[int, list[float]]] = {}
        cells = [c for c in cells_of(records) if (c.workload, c.training) == (workload, training)]
        for cell in cells:
            for contender, measured in speeds_of(records, cell).items():
                lines.setdefault(contender, {})[cell.num_envs] = measured
        for contender, points in lines.items():
            numbers = sorted(points)
            medians = [statistics.median(points[number]) for number in numbers]
            width = 2.5 if contender.startswith("hts") else 1.2
            axes.plot(numbers, medians, "o-", label=contender, linewidth=width)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({cell.num_envs for cell in cells}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="environments", ylabel="steps per second", title=cells[0].title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    return True
