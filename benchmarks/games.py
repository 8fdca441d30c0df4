"""Steps per second on the twelve Atari games of the HTS-RL paper, against their step times.

    python benchmarks/games.py --output-dir runs/games
    python benchmarks/games.py --games Breakout Qbert --seconds 20 --repetitions 3

For each game, the collectors train with A2C on 16 environments, in turns (see throughput.py). The
time of an environment's step is measured alone. Games whose steps differ more in their time (resets
and lost lives included) are those where a collector that waits for the slowest one waits most.
Writes games.json after each measurement, so that a run that was stopped goes on where it was, with
what has failed too. What was measured at another commit or under other settings is refused. Then
writes games.svg: steps per second of HTSCollector over the best of TorchRL's, against that
variation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from _contenders import NAMES, SAMPLE_FACTORY
from _machine import essentials
from _measurements import Measurements, Record, has_failed, keep_others_out
from _measuring import run_alone
from _recipes import HERE
from _report import Cell, speeds_of
from _workloads import TRAININGS
from matplotlib.figure import Figure

from torchrl_hts.bench.command_line import count, make_directory, positive
from torchrl_hts.envs import make_atari

GAMES = [
    "BankHeist",
    "BeamRider",
    "Breakout",
    "Frostbite",
    "Jamesbond",
    "Krull",
    "KungFuMaster",
    "MsPacman",
    "Qbert",
    "Seaquest",
    "SpaceInvaders",
    "StarGunner",
]
NUM_ENVS = 16
CHOICES = [name for name in NAMES if name != SAMPLE_FACTORY]  # whose loss is not A2C's
CONTENDERS = ["hts", "multi-sync", "multi-async", "parallel"]
STEPS = 4_000  # whose time is measured
STEP_TIMES = "step times"  # a record without a contender


def step_times(env_id: str) -> np.ndarray[Any, Any]:
    """Seconds of each step of random play, the reset after an episode's end included."""
    env = make_atari(env_id)
    env.reset(seed=0)
    env.action_space.seed(0)
    times = np.empty(STEPS)
    for step in range(STEPS):
        action = int(env.action_space.sample())
        began = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        times[step] = time.perf_counter() - began
    return times


def measure(options: argparse.Namespace, measurements: Measurements) -> None:
    """Measure what is missing: step times in this process, each contender in one of its own."""
    script = [str(HERE / "throughput.py"), "--seconds", str(options.seconds), "--alone"]
    for game in options.games:
        env_id = f"ALE/{game}-v5"
        if not measurements.has(key := {"workload": env_id, "contender": STEP_TIMES}):
            times = step_times(env_id)
            found = {"step_ms": 1e3 * float(times.mean()), "step_std_ms": 1e3 * float(times.std())}
            measurements.add(key, found)
        for repetition, contender in product(range(options.repetitions), options.contenders):
            cell = Cell(env_id, options.training, NUM_ENVS)
            key = {**cell._asdict(), "contender": contender, "repetition": repetition}
            if measurements.has(key):
                continue
            print(f"[{game}, {contender}, {repetition + 1}]", file=sys.stderr, flush=True)
            work = [contender, *map(str, cell)]
            run = run_alone([*script, *work], 300 + 4 * options.seconds)
            if "error" in run:
                print(f"  {contender}: {run['error']}", file=sys.stderr)
            measurements.add(key, run)


def results_of(options: argparse.Namespace, records: list[Record]) -> dict[str, dict[str, Any]]:
    """Step times of each game that was asked for, and the speeds of all that were measured."""
    results = {}
    for game in options.games:
        cell = Cell(f"ALE/{game}-v5", options.training, NUM_ENVS)
        (times,) = (
            each
            for each in records
            if (each["workload"], each["contender"]) == (cell.workload, STEP_TIMES)
        )
        played = [each for each in records if each["contender"] != STEP_TIMES]
        results[game] = {**times, "speeds": speeds_of(played, cell)}
    return results


def ratio(result: dict[str, Any]) -> float:
    """HTSCollector's median over the best median of those that aren't HTSCollector."""
    medians = {name: statistics.median(s) for name, s in result["speeds"].items()}
    others = [median for name, median in medians.items() if not name.startswith("hts")]
    return medians["hts"] / max(others) if "hts" in medians and others else float("nan")


def print_table(results: dict[str, dict[str, Any]], contenders: list[str]) -> None:
    """A row per game, in Markdown: medians (least to most)."""
    columns = ["game", "ms per step (std)", *contenders, "hts / best other"]
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for game, result in results.items():
        cells = [game, f"{result['step_ms']:.2f} ({result['step_std_ms']:.2f})"]
        for name in contenders:
            measured = result["speeds"].get(name, [])
            cells.append(
                f"{statistics.median(measured):,.0f} ({min(measured):,.0f}-{max(measured):,.0f})"
                if measured
                else "failed"
            )
        print("| " + " | ".join([*cells, f"{ratio(result):.2f}"]) + " |")


def draw(results: dict[str, dict[str, Any]], training: str, path: Path) -> None:
    """The ratio of speeds against the variation of step times."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for game, result in results.items():
        variation = result["step_std_ms"] / result["step_ms"]
        axes.plot(variation, ratio(result), "o", color="tab:blue")
        axes.annotate(game, (variation, ratio(result)), xytext=(4, 4), textcoords="offset points")
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.margins(x=0.15)  # names stand to the right of their points
    axes.set(
        xlabel="standard deviation of a step's time / its mean",
        ylabel="steps per second, HTSCollector / best of TorchRL's",
        title=f"{TRAININGS[training].description}, {NUM_ENVS} environments",
    )
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Parses the flags, measures what is missing, and shows all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    parser.add_argument(
        "--games", nargs="+", default=GAMES, metavar="NAME", help="by default all twelve"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CHOICES,
        default=CONTENDERS,
        metavar="NAME",
        help=f"of {', '.join(CHOICES)}; by default {' '.join(CONTENDERS)}",
    )
    parser.add_argument("--training", choices=["a2c5", "a2c20"], default="a2c5")
    parser.add_argument("--seconds", type=positive, default=10.0, help="of each measurement (10)")
    parser.add_argument("--repetitions", type=count, default=2, help="of each contender (2)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs", "games"))
    options = parser.parse_args()

    make_directory(options.output_dir)
    keep_others_out(options.output_dir)
    conditions = {**essentials(), "seconds": options.seconds}
    measurements = Measurements(options.output_dir / "games.json", conditions)
    measure(options, measurements)
    results = results_of(options, measurements.records)
    print_table(results, options.contenders)
    draw(results, options.training, options.output_dir / "games.svg")
    asked = {f"ALE/{game}-v5" for game in options.games}
    shown = [each for each in measurements.records if each["workload"] in asked]
    if failed := sum(map(has_failed, shown)):
        raise SystemExit(f"error: {failed} measurements failed; the same command tries them again")


if __name__ == "__main__":
    main()
