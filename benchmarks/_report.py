"""What is made of the measurements: a table for each cell of the benchmark, and pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from _measurements import Record, has_failed
from _workloads import CORES, TRAININGS, find_workload
from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Parts(NamedTuple):
    """How emulator, inference and learning are measured by themselves.

    Attributes:
        copies: processes that do so at the same time.
        name: what the speed is called that all cores would come to by these times.
    """

    copies: int
    name: str


# Caches, memory and a host's other guests are shared: what one core does while the others are idle,
# all together may not.
PARTS = {
    "parts": Parts(1, "parts alone"),
    "parts-together": Parts(CORES, "parts, cores busy"),
}
PART_TIMES = ("emulator_s", "inference_s", "learning_s")
# Processor time per step, where a record tells, and who used it.
CPU_TIMES = {
    "executors_cpu_s": "executors",
    "actors_cpu_s": "actors",
    "learner_cpu_s": "learner",
}
SHOWN_STOLEN = 0.01  # of the cores: less is not worth a line
LINES = {"ideal": "--", "parts alone": "--", "parts, cores busy": ":"}


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


def values_of(records: Iterable[Record], cell: Cell, key: str) -> dict[str, list[float]]:
    """What the records tell by this key, by contender, the highest median first."""
    values: dict[str, list[float]] = {}
    for record in records:
        if cell_of(record) == cell and key in record:
            values.setdefault(record["contender"], []).append(record[key])
    return dict(sorted(values.items(), key=lambda item: -statistics.median(item[1])))


def speeds_of(records: Iterable[Record], cell: Cell) -> dict[str, list[float]]:
    """Steps per second by contender, the highest median first."""
    return values_of(records, cell, "steps_per_second")


def medians_by_key(
    records: Iterable[Record], cell: Cell, contender: str, keys: Iterable[str]
) -> dict[str, float]:
    """Medians of what a contender's records tell by these keys; empty where they don't.

    Of several processes that were to work at the same time each must have.
    """
    runs = [
        run
        for record in records
        if cell_of(record) == cell and record["contender"] == contender and not has_failed(record)
        for run in record.get("runs", [record])
        if run.keys() >= {*keys}
    ]
    return {key: statistics.median(run[key] for run in runs) for key in keys} if runs else {}


def yardsticks_of(records: Iterable[Record], cell: Cell) -> dict[str, float]:
    """Steps per second that a cell's are shown as shares of, by what they are called.

    Only the ideal can't be exceeded. Among the parts is inference as torch runs the policy, and
    HTSCollector runs small ones in numpy.
    """
    slowest_step_s = find_workload(cell.workload).slowest_step_s
    if slowest_step_s is not None:
        return {"ideal": cell.num_envs / slowest_step_s}
    times = {parts: medians_by_key(records, cell, parts, PART_TIMES) for parts in PARTS}
    return {
        PARTS[parts].name: CORES / sum(seconds.values())
        for parts, seconds in times.items()
        if seconds
    }


def failures_of(records: Iterable[Record], cell: Cell) -> list[tuple[str, str]]:
    """What could not be measured, and why."""
    failed = {
        (record["contender"], run["error"])
        for record in records
        if cell_of(record) == cell
        for run in [record, *record.get("runs", [])]
        if "error" in run
    }
    return sorted(failed)


def print_table(records: list[Record], cell: Cell) -> None:
    """Medians of one cell, fastest first."""
    print(f"\n{cell.title}, {cell.num_envs} environments")
    yardsticks = yardsticks_of(records, cell)
    for parts in PARTS:
        if seconds := medians_by_key(records, cell, parts, PART_TIMES):
            print(
                f"  {parts}, ms per step: emulator {seconds['emulator_s'] * 1e3:.3f}, inference "
                f"{seconds['inference_s'] * 1e3:.3f}, learning {seconds['learning_s'] * 1e3:.3f}; "
                f"by that {CORES} cores make {yardsticks[PARTS[parts].name]:,.0f} steps/s"
            )
    for contender, error in failures_of(records, cell):
        print(f"  {contender}: {error}")
    speeds = speeds_of(records, cell)
    others = [statistics.median(s) for name, s in speeds.items() if not name.startswith("hts")]
    header = f"  {'contender':<18}{'steps/s':>10}{'least':>10}{'most':>10}"
    header += "".join(f"{f'of {name}':>22}" for name in yardsticks)
    header += f"{'of best other':>17}"
    memory = {name: medians_by_key(records, cell, name, ["memory_mib"]) for name in speeds}
    print(header + (f"{'MiB in all':>13}" if any(memory.values()) else ""))
    for contender, measured in speeds.items():
        median = statistics.median(measured)
        line = f"  {contender:<18}{median:>10,.0f}{min(measured):>10,.0f}{max(measured):>10,.0f}"
        line += "".join(f"{median / speed:>22.0%}" for speed in yardsticks.values())
        if others:
            line += f"{median / max(others):>17.2f}"
        if memory[contender]:
            line = f"{line:<{len(header)}}{memory[contender]['memory_mib']:>13,.0f}"
        print(line)
    print_notes(records, cell, [*speeds])


def print_notes(records: list[Record], cell: Cell, contenders: list[str]) -> None:
    """Below a cell's table: what contenders differ in, what they used, and what was taken away."""
    shapes = {
        each["contender"]: f"{each['threads']}, {' x '.join(map(str, each['batch']))}"
        for each in records
        if cell_of(each) == cell and "batch" in each
    }
    if shapes:
        told = "; ".join(f"{name} {shapes[name]}" for name in contenders if name in shapes)
        print(f"  threads of the learner, environments x steps of a batch: {told}")
    for contender in contenders:
        if used := medians_by_key(records, cell, contender, CPU_TIMES):
            parts = ", ".join(f"{CPU_TIMES[key]} {used[key] * 1e3:.3f}" for key in used)
            print(
                f"  {contender}, ms of CPU per step: {parts}; in all {sum(used.values()) * 1e3:.3f}"
            )
    stolen = values_of(records, cell, "stolen_share")
    if any(max(shares) >= SHOWN_STOLEN for shares in stolen.values()):
        shares = ", ".join(
            f"{name} {statistics.median(each):.0%} ({min(each):.0%}-{max(each):.0%})"
            for name, each in stolen.items()
        )
        print(f"  time of the cores that the host gave to others: {shares}")


Spread = tuple[list[float], list[float]]  # how far the least and the most are from the medians


def medians_of(measured: Iterable[list[float]]) -> tuple[list[float], Spread]:
    """The medians of several contenders, or cells, and their spread."""
    all_ = [*measured]
    medians = [statistics.median(each) for each in all_]
    low = [median - min(each) for median, each in zip(medians, all_, strict=True)]
    high = [max(each) - median for median, each in zip(medians, all_, strict=True)]
    return medians, (low, high)


def color(contender: str) -> str:
    """Ours stand out."""
    return "tab:orange" if contender.startswith("hts") else "tab:blue"


def draw_bars(records: list[Record], file: Path) -> None:
    """A panel per cell: medians, with lines from the least to the most, and the yardsticks."""
    cells = cells_of(records)
    speeds = {cell: speeds_of(records, cell) for cell in cells}
    heights = [1.2 + 0.3 * max(1, len(speeds[cell])) for cell in cells]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    grid = figure.subplots(len(cells), 1, squeeze=False, height_ratios=heights)
    for axes, cell in zip(grid[:, 0], cells, strict=True):
        names = [*reversed(speeds[cell])]
        measured = [speeds[cell][name] for name in names]
        medians, spread = medians_of(measured)
        axes.barh(names, medians, xerr=spread, color=[color(name) for name in names])
        yardsticks = yardsticks_of(records, cell)
        for name, speed in yardsticks.items():
            axes.axvline(speed, color="black", linestyle=LINES[name], label=name)
        if yardsticks:  # where the shortest bar leaves room
            axes.legend(fontsize="small", loc="lower right")
        axes.set_title(f"{cell.title}, {cell.num_envs} environments", fontsize="medium")
        axes.set_xlabel("steps per second")
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=120)


def draw_scaling(records: list[Record], file: Path) -> bool:
    """Steps per second against the number of environments; False if there is but one number."""
    panels: Panels = {}
    for cell in cells_of(records):
        panels.setdefault((cell.workload, cell.training), {})[cell.num_envs] = cell

    def decorate(axes: Axes, cells: dict[float, Cell]) -> None:
        axes.set(xlabel="environments", title=next(iter(cells.values())).title)
        axes.set_xscale("log", base=2)
        axes.set_xticks([*cells])
        axes.xaxis.set_major_formatter("{x:g}")

    return draw_lines(records, panels, decorate, file)


def draw_variation(records: list[Record], file: Path) -> bool:
    """Steps per second against the variation of step times; False if there is but one."""
    panels: Panels = {}
    for cell in cells_of(records):
        variation = find_workload(cell.workload).variation
        if variation is not None:
            panels.setdefault((cell.training, cell.num_envs), {})[variation] = cell

    def decorate(axes: Axes, cells: dict[float, Cell]) -> None:
        cell = next(iter(cells.values()))
        title = f"{TRAININGS[cell.training].description}, {cell.num_envs} environments"
        axes.set(xlabel="standard deviation of a step's time, over its mean", title=title)

    return draw_lines(records, panels, decorate, file)


Panels = dict[tuple[str, str | int], dict[float, Cell]]  # cells by where they are on the x axis


def draw_lines(
    records: list[Record],
    panels: Panels,
    decorate: Callable[[Axes, dict[float, Cell]], None],
    file: Path,
) -> bool:
    """A line for each contender in each panel with more than one cell; False if there is none."""
    shown = [dict(sorted(cells.items())) for cells in panels.values() if len(cells) > 1]
    if not shown:
        return False
    figure = Figure(figsize=(8, 4 * len(shown)), layout="constrained")
    grid = figure.subplots(len(shown), 1, squeeze=False)
    for axes, cells in zip(grid[:, 0], shown, strict=True):
        plot_lines(axes, records, cells)
        decorate(axes, cells)
    figure.savefig(file, dpi=120)
    return True


def plot_lines(axes: Axes, records: list[Record], cells: dict[float, Cell]) -> None:
    """A line through each contender's medians, with bars from the least to the most."""
    lines: dict[str, dict[float, list[float]]] = {}
    yardsticks: dict[str, dict[float, float]] = {}
    for position, cell in cells.items():
        for contender, measured in speeds_of(records, cell).items():
            lines.setdefault(contender, {})[position] = measured
        for name, speed in yardsticks_of(records, cell).items():
            yardsticks.setdefault(name, {})[position] = speed
    for contender, points in lines.items():
        medians, spread = medians_of(points.values())
        width = 2.5 if contender.startswith("hts") else 1.2
        axes.errorbar(
            [*points], medians, spread, fmt="o-", label=contender, linewidth=width, capsize=3
        )
    for name, heights in yardsticks.items():
        axes.plot([*heights], [*heights.values()], color="black", linestyle=LINES[name], label=name)
    axes.set_ylabel("steps per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
