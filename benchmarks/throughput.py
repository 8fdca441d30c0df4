"""Steps per second of HTSCollector and of TorchRL's own collectors, in one run.

    python benchmarks/throughput.py --json runs/throughput.json
    python benchmarks/throughput.py --workloads atari5 --contenders hts,multi-async --seconds 30

Workloads, with 16 environments each:

    sleep     an environment that only sleeps, exponential with a mean of 10 ms; alpha 20
    costless  an environment that costs nothing; alpha 20
    atari5    a game (Pong), collect and train with A2C, unroll of 5 steps
    atari20   the same, unroll of 20 steps
    startup   16 executors of Pong: time until ready, private memory, CPU time while idle

Contenders take turns, repetition by repetition, so that a machine that is busy for a while is busy
for all of them; the table shows medians. Each measurement is a process of its own, because
ParallelEnv and the multi-process collectors set the thread count of the process they are made in
and leave it there. Starting up and the first batches are not counted.

All contenders run the same network, loss, update and gymnasium-side preprocessing, on batches of
the same number of steps. The update is that of recipes/a2c_atari.py, which runs the shared trunk
once; with the suffix -stock (multi-async-stock, hts-stock, ...) it is what TorchRL's A2CLoss and
GAE do by themselves with a shared trunk. The multi-process collectors of TorchRL get a worker per
environment where environments sleep, and elsewhere a worker per core with the environments shared
out among them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _contenders import (
    ALPHA,
    CONTENDERS,
    CORES,
    DEFAULT_CONTENDERS,
    NUM_ENVS,
    SLEEP_MEAN_S,
    WORKLOADS,
)
from _measuring import machine, measure, measure_parts, run_alone

HERE = Path(__file__).resolve().parent


def ideal(workload: str, parts: dict[str, Any] | None) -> tuple[str, float] | None:
    """The figure that a workload's speeds are shown as a share of, and what it is called."""
    if workload == "sleep":
        return "of the ideal", NUM_ENVS / SLEEP_MEAN_S
    if parts is not None and "error" not in parts:
        return "of the CPU bound", parts["bound_steps_per_second"]
    return None


def print_table(
    workload: str, results: dict[str, list[dict[str, Any]]], parts: dict[str, Any] | None
) -> None:
    """Medians of one workload, fastest first."""
    print(f"\n{workload}: {NUM_ENVS} environments, alpha {ALPHA[workload]}")
    bound = ideal(workload, parts)
    if parts is not None and "error" not in parts:
        print(
            f"  alone, ms per step: emulator {parts['emulator_s'] * 1e3:.2f}, inference "
            f"{parts['inference_s'] * 1e3:.2f}, learning {parts['learning_s'] * 1e3:.2f}; "
            f"{CORES} cores can do {parts['bound_steps_per_second']:,.0f} steps/s"
        )
    speeds = {}
    for contender, runs in results.items():
        if measured := [run["steps_per_second"] for run in runs if "error" not in run]:
            speeds[contender] = measured
        for error in {run["error"] for run in runs if "error" in run}:
            print(f"  {contender}: {error}")
    others = [statistics.median(s) for name, s in speeds.items() if not name.startswith("hts")]
    header = f"  {'contender':<18}{'steps/s':>10}{'least':>10}{'most':>10}"
    print(header + (f"{bound[0]:>18}" if bound else "") + (f"{'of best TorchRL':>17}"))
    for contender, measured in sorted(speeds.items(), key=lambda item: -statistics.median(item[1])):
        median = statistics.median(measured)
        line = f"  {contender:<18}{median:>10,.0f}{min(measured):>10,.0f}{max(measured):>10,.0f}"
        if bound:
            line += f"{median / bound[1]:>18.0%}"
        if others:
            line += f"{median / max(others):>17.2f}"
        print(line)


def print_startup(runs: list[dict[str, Any]]) -> None:
    """Medians of the start-up workload."""
    print("\nstartup: 16 Pong executors, from a script that imports torch and has no main guard")
    for error in {run["error"] for run in runs if "error" in run}:
        print(f"  {error}")
    measured = [run for run in runs if "error" not in run]
    for key, label in (
        ("executors_ready_s", "seconds until the last executor has its game"),
        ("constructed_s", "seconds until the collector is made, actors included"),
        ("first_batch_s", "seconds until the first batch"),
        ("private_mib_per_executor_mean", "MiB of private memory per executor, mean"),
        ("private_mib_per_executor_max", "MiB of private memory per executor, most"),
        ("idle_cpu_share", "cores used by all workers while they wait"),
    ):
        if measured:
            print(f"  {statistics.median(run[key] for run in measured):8.2f}  {label}")


def names(known: list[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return parse


def main() -> None:
    """Parses the flags, and measures or prints one measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads",
        type=names(WORKLOADS),
        default=WORKLOADS,
        help=f"of {','.join(WORKLOADS)}; by default all",
    )
    parser.add_argument(
        "--contenders",
        type=names(CONTENDERS),
        default=DEFAULT_CONTENDERS,
        help=f"of {', '.join(CONTENDERS)}; by default {','.join(DEFAULT_CONTENDERS)}",
    )
    parser.add_argument("--env-id", default="ALE/Pong-v5", help="game of atari5 and atari20")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement (15)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each contender (3)")
    parser.add_argument("--warm-up", type=int, default=5, help="batches not counted (5)")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument(
        "--alone", nargs=2, metavar=("WORKLOAD", "CONTENDER"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()

    if options.alone is not None:
        workload, contender = options.alone
        if contender == "parts":
            result = measure_parts(workload, options.env_id, options.seconds)
        else:
            result = measure(workload, contender, options.env_id, options.seconds, options.warm_up)
        print(json.dumps(result))
        return

    facts = machine()
    for name, value in facts.items():
        print(f"{name}: {value}")
    report: dict[str, Any] = {"machine": facts, "results": {}, "parts": {}}
    limit_s = 300 + 4 * options.seconds
    settings = ["--seconds", str(options.seconds), "--warm-up", str(options.warm_up)]
    settings += ["--env-id", options.env_id]
    for workload in options.workloads:
        results: dict[str, list[dict[str, Any]]] = {}
        report["results"][workload] = results
        parts = None
        if workload.startswith("atari"):
            alone = [str(Path(__file__)), *settings, "--alone", workload, "parts"]
            parts = report["parts"][workload] = run_alone(alone, limit_s)
        for repetition in range(options.repetitions):
            if workload == "startup":
                run = run_alone([str(HERE / "_startup.py"), str(NUM_ENVS)], limit_s)
                results.setdefault("hts", []).append(run)
                continue
            for contender in options.contenders:
                if contender == "async-batched" and workload.startswith("atari"):
                    continue  # its batches are flat and interleaved: GAE can't use them
                print(f"[{workload}, {contender}, {repetition + 1}]", file=sys.stderr, flush=True)
                run = run_alone(
                    [str(Path(__file__)), *settings, "--alone", workload, contender], limit_s
                )
                results.setdefault(contender, []).append(run)
        if workload == "startup":
            print_startup(results["hts"])
        else:
            print_table(workload, results, parts)
    report["machine"]["load_average_at_end"] = os.getloadavg()
    print(f"\nload average at the end: {os.getloadavg()}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
