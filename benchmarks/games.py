"""Steps per second on the twelve Atari games of the HTS-RL paper, against their step times.

    python benchmarks/games.py --output-dir runs/games
    python benchmarks/games.py --games Breakout Qbert --seconds 20 --repetitions 3

For each game, the collectors train with A2C on 16 environments, in turns (see throughput.py). The
time of an environment's step is measured alone. Games whose steps differ more in their time (resets
and lost lives included) are those where a collector that waits for the slowest one waits most.
Writes games.json after each game, so that a run that was stopped goes on where it was. Then writes
games.svg: steps per second of HTSCollector over the best of TorchRL's, against that variation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from _contenders import NAMES, SAMPLE_FACTORY
from _machine import machine
from _measuring import run_alone
from _recipes import HERE
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


def measure_game(game: str, options: argparse.Namespace) -> dict[str, Any]:
    """Step times and steps per second of one game."""
    env_id = f"ALE/{game}-v5"
    times = step_times(env_id)
    speeds: dict[str, list[float]] = {name: [] for name in options.contenders}
    script = [str(HERE / "throughput.py"), "--seconds", str(options.seconds), "--alone"]
    for repetition in range(options.repetitions):
        for contender in options.contenders:
            print(f"[{game}, {contender}, {repetition + 1}]", file=sys.stderr, flush=True)
            work = [contender, env_id, options.training, str(NUM_ENVS)]
            run = run_alone([*script, *work], 300 + 4 * options.seconds)
            if "error" in run:
                print(f"  {contender}: {run['error']}", file=sys.stderr)
            else:
                speeds[contender].append(run["steps_per_second"])
    return {
        "step_ms": 1e3 * float(times.mean()),
        "step_std_ms": 1e3 * float(times.std()),
        "speeds": speeds,
    }


def ratio(result: dict[str, Any]) -> float:
    """HTSCollector's median over the best median of the others."""
    medians = {name: statistics.median(s) for name, s in result["speeds"].items() if s}
    others = [median for name, median in medians.items() if name != "hts"]
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
    file = options.output_dir / "games.json"
    report = json.loads(file.read_text()) if file.exists() else {"results": {}}
    for game in options.games:
        if game not in report["results"]:
            report["machine"] = machine()
            report["results"][game] = measure_game(game, options)
            file.write_text(json.dumps(report, indent=2) + "\n")
    print_table(report["results"], options.contenders)
    draw(report["results"], options.training, options.output_dir / "games.svg")


if __name__ == "__main__":
    main()
