"""What football gains where environments don't wait for each other at each step.

    python benchmarks/football_steps.py --output-dir runs/football_steps
    python benchmarks/football_barrier.py runs/football_steps/football_steps.json

Environments sleep for the step times that football_steps.py has recorded, resets among them, in
their order; each begins at a place of its own in the record. So each has a core of its own, as it
were. Compared are HTSCollector and gymnasium's AsyncVectorEnv in a plain loop, where all wait for
the slowest at each step: same policy, same steps.

    measured   steps per second of the one over those of the other, in turns
    predicted  the same from the recursion (torchrl_hts.theory.timetable), with the recorded times
               and nothing else: who waits for whom, but no inference and no wake-ups

All times are made --slower times as long, so that a few cores keep up with what 16 real ones do:
the shape of their distribution stays what it is. Writes football_barrier.json next to the record
after each scenario, so that a run that was stopped goes on where it was, and football_barrier.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _contenders import CONTENDERS, CollectorRunner
from _environments import RecordedEnv
from _machine import machine
from _measurements import write_json
from _records import SLOWER, read_record, seconds_of, shares_of
from _workloads import TRAININGS, Workload
from matplotlib.figure import Figure

from torchrl_hts.bench.command_line import count, positive
from torchrl_hts.theory import timetable

Array = np.ndarray[Any, Any]

TRAINING = "collect"
WARM_UP = 3  # rounds that aren't measured
BARRIERS: dict[str, Any] = {"hts": None, "loop-gymnasium": "step"}  # by contender


def predict(times_s: Array, barrier: Any) -> float:
    """Steps per second after the warm-up, for step times ``[N, steps]``."""
    num_envs, num_steps = times_s.shape
    alpha = TRAININGS[TRAINING].sync_interval
    rounds = times_s.reshape(num_envs, num_steps // alpha, alpha).transpose(1, 0, 2)
    full = timetable(rounds, lag=1, barrier=barrier).learned
    return (len(rounds) - WARM_UP) * num_envs * alpha / float(full[-1] - full[WARM_UP - 1])


def measure(times_s: Array, contender: str) -> float:
    """The same, for what a contender did."""
    num_envs, num_steps = times_s.shape
    factories = [partial(RecordedEnv, times) for times in times_s]
    workload = Workload("recorded times", lambda count: list(factories[:count]), waits=True)
    training = TRAININGS[TRAINING]
    runner = CollectorRunner(CONTENDERS[contender], workload, training, num_envs, stock=False)
    try:
        for _ in range(WARM_UP):
            runner.advance()
        rounds = num_steps // training.sync_interval - WARM_UP
        began = time.perf_counter()
        frames = sum(runner.advance() for _ in range(rounds))
        return frames / (time.perf_counter() - began)
    finally:
        runner.close()


def compare(result: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Both contenders, predicted and measured, on what was recorded of a scenario."""
    num_steps = (options.rounds + WARM_UP) * TRAININGS[TRAINING].sync_interval
    times_s = shares_of(seconds_of(result, options.slower), options.num_envs, num_steps)
    measured: dict[str, list[float]] = {contender: [] for contender in BARRIERS}
    for _ in range(options.repetitions):
        for contender, all_ in measured.items():
            all_.append(measure(times_s, contender))
    predicted = {contender: predict(times_s, barrier) for contender, barrier in BARRIERS.items()}
    gains = [h / g for h, g in zip(measured["hts"], measured["loop-gymnasium"], strict=True)]
    return {
        "mean_s": float(times_s.mean()),
        "ideal_steps_per_second": options.num_envs / float(times_s.mean()),
        "predicted_steps_per_second": predicted,
        "measured_steps_per_second": measured,
        "predicted_gain": predicted["hts"] / predicted["loop-gymnasium"],
        "measured_gains": gains,
    }


def print_table(compared: dict[str, dict[str, Any]]) -> None:
    """A row per scenario, in Markdown."""
    print("| scenario | gain predicted | measured | HTSCollector, share of ideal: predicted | "
          "measured | barrier at each step: predicted | measured |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for scenario, each in compared.items():
        ideal = each["ideal_steps_per_second"]
        cells = [
            f"{each['predicted_gain']:.2f}",
            f"{statistics.median(each['measured_gains']):.2f}",
        ]
        for contender in BARRIERS:
            measured = statistics.median(each["measured_steps_per_second"][contender])
            cells.append(f"{each['predicted_steps_per_second'][contender] / ideal:.2f}")
            cells.append(f"{measured / ideal:.2f}")
        print(f"| {scenario} | {' | '.join(cells)} |")


def draw(compared: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Gain by scenario, predicted and measured."""
    figure = Figure(figsize=(8, 0.34 * len(compared) + 1.5), layout="constrained")
    axes = figure.subplots()
    rows = np.arange(len(compared))
    predicted = [each["predicted_gain"] for each in compared.values()]
    axes.barh(rows, predicted, color="#aed6f1", label="predicted from the recorded times")
    for row, each in zip(rows, compared.values(), strict=True):
        gains = each["measured_gains"]
        axes.plot(gains, [row] * len(gains), "o", color="#1b4f72", markersize=4,
                  label="measured" if row == 0 else None)  # fmt: skip
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.set_yticks(rows, list(compared))
    axes.invert_yaxis()
    axes.set(xlabel="steps per second over those with a barrier at each step")
    figure.suptitle(title)
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path)


def main() -> None:
    """Parses the flags, measures what is missing, and shows all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path, help="football_steps.json")
    parser.add_argument("--num-envs", type=count, default=16, help="environments (16)")
    parser.add_argument("--rounds", type=count, default=25, help="of 20 steps, measured (25)")
    parser.add_argument("--repetitions", type=count, default=2, help="of each (2)")
    parser.add_argument(
        "--slower", type=positive, default=SLOWER, help=f"factor on all times ({SLOWER:g})"
    )
    options = parser.parse_args()
    record = read_record(parser, options.record)
    file = options.record.with_name("football_barrier.json")
    keys = ("num_envs", "rounds", "repetitions", "slower")
    of = [record["settings"], record["machine"]["time"]]
    settings = {"of": of, **{key: getattr(options, key) for key in keys}}
    report = {"settings": settings, "machine": machine(), "results": {}}
    if file.exists():
        report = json.loads(file.read_text())
        if report["settings"] != settings:
            parser.error(f"{file} is of {report['settings']}: delete it, or move it away")
    for scenario, result in record["results"].items():
        if scenario not in report["results"]:
            print(f"[{scenario}]", file=sys.stderr, flush=True)
            report["results"][scenario] = compare(result, options)
            write_json(file, report)
    compared = {scenario: report["results"][scenario] for scenario in record["results"]}
    print_table(compared)
    title = f"{options.num_envs} environments that take the times of football's steps and resets"
    draw(compared, title, file.with_suffix(".svg"))


if __name__ == "__main__":
    main()
