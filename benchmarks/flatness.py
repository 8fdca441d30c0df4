"""Whether a long run stays as it begins: memory, file descriptors and steps per second over time.

    python benchmarks/flatness.py --steps 10_000_000
    python benchmarks/flatness.py --pid 4711 --metrics runs/ppo_atari/.../metrics.csv --minutes 120

The first runs HTSCollector on environments that cost nothing, in a process of its own, and watches
it to its end. The second watches a run that is under way, such as a recipe's, from outside. Watched
are the process and all that descend from it. Memory is what a process has to itself plus its part
of what it shares with others of the run. Pages of libraries are left out, whose share depends on
whoever else on the machine uses them.

Writes processes.csv as it goes, and flatness.svg; prints how each process, and the speed, changed
from the second tenth of the time to the last. Linux only.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import _recipes  # noqa: F401  so that the package of this checkout is found
from _processes import descendants, held_mib
from matplotlib.figure import Figure

from torchrl_hts.bench.command_line import count, make_directory, positive

COLUMNS = ("elapsed_s", "pid", "memory_mib", "descriptors", "name")
_OWN = ("Pss_Anon", "Pss_Shmem")  # of smaps_rollup
REPORT_STEPS = 50_000  # between two rows of the costless run's metrics


class Sample(NamedTuple):
    """One process at one time."""

    elapsed_s: float
    pid: int
    memory_mib: float
    descriptors: int
    name: str


def run_costless(steps: int, metrics: Path) -> None:
    """Collects from 16 environments that cost nothing, and writes steps and time."""
    import torch  # which a process that only watches does without
    from _contenders import make_runner

    torch.set_num_threads(1)
    runner = make_runner("hts", "costless", "collect", 16)
    began, done, written = time.perf_counter(), 0, 0
    with metrics.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerows([["step", "time/elapsed_s"], [0, 0.0]])
        while done < steps:
            done += runner.advance()
            if done - written >= REPORT_STEPS or done >= steps:
                written = done
                rows.writerow([done, round(time.perf_counter() - began, 3)])
                file.flush()
    runner.close()


def sample(pid: int, elapsed_s: float) -> Sample | None:
    """What a process uses now; None if it has ended."""
    try:
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        name = Path(f"/proc/{pid}/comm").read_text().rstrip()
    except OSError:
        return None
    held = held_mib(pid)
    if not held:
        return None
    own_mib = sum(held[kind] for kind in _OWN)
    return Sample(round(elapsed_s, 1), pid, round(own_mib, 2), descriptors, name)


def watch(pid: int, seconds: float, interval_s: float, file: Path) -> list[Sample]:
    """Samples a process and its descendants until it ends, or the time is over, or Ctrl-C."""
    samples: list[Sample] = []
    began = time.monotonic()
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(COLUMNS)
        try:
            while (elapsed_s := time.monotonic() - began) < seconds and alive(pid):
                found = [sample(each, elapsed_s) for each in descendants(pid)]
                new = [each for each in found if each is not None]
                samples += new
                rows.writerows(new)
                stream.flush()
                total = sum(each.memory_mib for each in new)
                print(f"{elapsed_s:.0f} s: {len(new)} processes, {total:.0f} MiB", flush=True)
                time.sleep(interval_s)
        except KeyboardInterrupt:
            print("stopped watching", file=sys.stderr)
    return samples


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def speeds(metrics: Path, points: int = 50) -> list[tuple[float, float]]:
    """Seconds and steps per second over equal numbers of rows of a run's metrics."""
    with metrics.open(newline="") as file:
        whole = [
            r for r in csv.DictReader(file) if r["time/elapsed_s"]
        ]  # the last is being written
        rows = [(float(r["time/elapsed_s"]), int(r["step"])) for r in whole]
    every = max(1, len(rows) // points)
    chosen = rows[::every]
    return [
        (end_s, (end - start) / (end_s - start_s))
        for (start_s, start), (end_s, end) in pairwise(chosen)
    ]


def change(series: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Medians of the second tenth of the time and of its last tenth."""
    last = series[-1][0]
    early = [value for at, value in series if 0.1 * last <= at < 0.2 * last]
    late = [value for at, value in series if at >= 0.9 * last]
    return median(early or [series[0][1]]), median(late)


def of_each(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """The samples of each process."""
    by_pid: dict[int, list[Sample]] = defaultdict(list)
    for each in samples:
        by_pid[each.pid].append(each)
    return by_pid


def report(samples: Sequence[Sample], speed: Sequence[tuple[float, float]], main_pid: int) -> None:
    """Prints a Markdown table of what has changed, of processes that were there to the end."""
    last = max(each.elapsed_s for each in samples)
    print("| | second tenth | last tenth | change |")
    print("| --- | --- | --- | --- |")

    def row(name: str, series: Sequence[tuple[float, float]]) -> None:
        early, late = change(series)
        # A process has no memory of its own yet when it has just begun.
        by = f"{(late / early - 1) * 100:+.1f} %" if early else "-"
        print(f"| {name} | {early:,.1f} | {late:,.1f} | {by} |")

    for pid, own in of_each(samples).items():
        if own[-1].elapsed_s >= 0.9 * last:
            name = "main process" if pid == main_pid else f"{own[-1].name} ({pid})"
            row(f"{name}, MiB", [(each.elapsed_s, each.memory_mib) for each in own])
            row(f"{name}, descriptors", [(each.elapsed_s, each.descriptors) for each in own])
    if speed:
        row("steps per second", speed)


def draw(
    samples: Sequence[Sample], speed: Sequence[tuple[float, float]], main_pid: int, file: Path
) -> None:
    """Memory and descriptors of each process, and the speed, against minutes."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    memory, descriptors, steps = figure.subplots(3, 1, sharex=True)
    for pid, own in of_each(samples).items():
        minutes = [each.elapsed_s / 60 for each in own]
        name = "main process" if pid == main_pid else own[-1].name
        memory.plot(minutes, [each.memory_mib for each in own], label=name)
        descriptors.plot(minutes, [each.descriptors for each in own])
    steps.plot([at / 60 for at, _ in speed], [value for _, value in speed], color="black")
    memory.set(ylabel="memory, MiB")
    memory.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    descriptors.set(ylabel="file descriptors")
    steps.set(ylabel="steps per second", xlabel="minutes")
    for axes in (memory, descriptors, steps):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(file)


def end(process: subprocess.Popen[bytes], metrics: Path, steps: int) -> str | None:
    """Ends a run that is no longer watched; returns what was wrong with one that has ended."""
    code = process.poll()
    if code is None:  # the time is over, or Ctrl-C
        process.terminate()
        process.wait()
        return None
    if code:
        return f"the run ended by itself with exit code {code}"
    with metrics.open(newline="") as file:
        done = [int(row["step"]) for row in csv.DictReader(file)][-1]
    return None if done >= steps else f"the run ended after {done} of {steps} steps"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--steps", type=count, default=10_000_000, help="of a costless run (10 million)"
    )
    what.add_argument("--pid", type=int, help="of a run that is under way")
    parser.add_argument("--metrics", type=Path, help="metrics.csv of that run, for its speed")
    parser.add_argument("--minutes", type=positive, default=float("inf"), help="at most so long")
    parser.add_argument(
        "--interval", type=positive, default=10.0, help="seconds between samples (10)"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/flatness"))
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.metrics is not None and given.pid is None:
        parser.error("--metrics are of the run of --pid, which is not given")
    if given.metrics is not None and not given.metrics.is_file():
        parser.error(f"--metrics {given.metrics}: there is no such file")
    return given


def main() -> int:
    """Watches a run, and shows how it changed; returns the exit code."""
    given = parse()
    if given.alone is not None:
        run_costless(given.steps, given.alone)
        return 0
    make_directory(given.output_dir)
    pid, metrics, process = given.pid, given.metrics, None
    if pid is None:
        metrics = given.output_dir / "metrics.csv"
        command = [sys.executable, __file__, "--steps", str(given.steps), "--alone", str(metrics)]
        process = subprocess.Popen(command)
        pid = process.pid
    elif not alive(pid):
        print(f"error: there is no process {pid}", file=sys.stderr)
        return 1
    samples = watch(pid, 60 * given.minutes, given.interval, given.output_dir / "processes.csv")
    wrong = None if process is None else end(process, metrics, given.steps)
    if wrong is not None:
        print(f"error: {wrong}", file=sys.stderr)
    if not samples:
        print("error: there was nothing to watch", file=sys.stderr)
        return 1
    speed = speeds(metrics) if metrics is not None and metrics.exists() else []
    if given.pid is not None and speed:  # by the clock of the watch, which began later
        late = speed[-1][0] - samples[-1].elapsed_s
        speed = [(at - late, value) for at, value in speed if at >= late]
    report(samples, speed, pid)
    draw(samples, speed, pid, given.output_dir / "flatness.svg")
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main())
