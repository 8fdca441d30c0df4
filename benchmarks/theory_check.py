"""What the theory predicts against what the collector does, for short and long rounds.

    python benchmarks/theory_check.py --output-dir runs/theory
    python benchmarks/theory_check.py --env-id my_module:make_env --output-dir runs/theory_mine
    python benchmarks/theory_check.py --record runs/football_steps/football_steps.json \
        --scenario academy_3_vs_1_with_keeper --output-dir runs/theory_football

runs `HTSCollector` for each number of environments, alpha and lag with an update that takes 0.3
alpha mean steps (it sleeps). It takes the time of every step and update from the collector's
timeline. Compared are, as shares of the time in which environments step:

    measured  what it did
    recorded  the recursion (torchrl_hts.theory.timetable) with the very times of the run, in their
              order: what is missing is waiting for actions and for a core
    i.i.d.    the recursion with the same times in random order, as if steps depended on nothing:
              where it differs from `recorded`, that assumption fails

Writes theory.json after each point, so that a run that was stopped goes on where it was, and
theory.svg. By default environments sleep, for 10 ms on average, exponentially; others are named as
for `python -m torchrl_hts.bench`. With --record they sleep for the times of football's steps and
resets that football_steps.py has recorded, in their order, each from a place of its own. They sleep
--slower times as long, so each has a core of its own, as it were. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import _recipes  # noqa: F401  so that the package of this checkout is found
import numpy as np
import torch
from _environments import RecordedEnv, SleepEnv
from _machine import machine
from _measurements import write_json
from _records import SLOWER, read_record, seconds_of, shares_of
from matplotlib.figure import Figure

from torchrl_hts import HTSCollector, Timeline, keep_servers
from torchrl_hts._rounds.event_rings import Activity
from torchrl_hts.bench.__main__ import find_environment
from torchrl_hts.bench.command_line import count, make_directory, positive
from torchrl_hts.bench.measuring import default_policy, measure_environment
from torchrl_hts.theory import rollout_time, timetable

SLEEP = "sleep"
CONDITIONS = ("seconds", "rounds", "mean_ms", "num_executors")  # of all points in a directory
LEARNER = 0.3  # of the mean time of a round's steps
SHUFFLES = 20
COLOURS = {0: "#c0392b", 1: "#2471a3", 2: "#1e8449"}
Array = np.ndarray[Any, Any]


def work_of(timeline: Timeline, owner: Array, rounds: int) -> Array:
    """``[rounds, executors, steps]``: the time of each step, in the order they were made."""
    steps = timeline.of(Activity.STEP)
    of_round = timeline.rounds(steps)
    each = [
        [
            (steps["ended"] - steps["began"])[
                (of_round == round_) & np.isin(steps["env"], np.flatnonzero(owner == executor))
            ]
            for executor in range(owner.max() + 1)
        ]
        for round_ in range(rounds)
    ]
    longest = max(len(times) for row in each for times in row)
    padded = np.zeros((rounds, owner.max() + 1, longest))
    for round_, row in enumerate(each):
        for executor, times in enumerate(row):
            padded[round_, executor, : len(times)] = times
    return padded / 1e9


def measure(
    options: argparse.Namespace, n: int, alpha: int, lag: int, mean_s: float
) -> dict[str, Any]:
    """One point."""
    factories: list[Any]
    if options.recorded_s is not None:
        parts = shares_of(options.recorded_s, n, len(options.recorded_s))
        factories = [partial(RecordedEnv, times_s) for times_s in parts]
    elif options.env_id == SLEEP:
        factories = [partial(SleepEnv, env, mean_s=options.mean_ms / 1e3) for env in range(n)]
    else:
        factories = [find_environment(options.env_id)] * n
    executors = min(n, options.num_executors or n)
    rounds = max(options.rounds, round(options.seconds / (alpha * mean_s)))
    env = factories[0]()
    torch.manual_seed(0)
    policy = default_policy(env)
    env.close()
    with HTSCollector(
        factories,
        policy,
        frames_per_batch=n * alpha,
        total_frames=n * alpha * (rounds + 1),  # the last update is done when one more is asked for
        num_executors=executors,
        lag=lag,
        seed=0,
        timeline_events=3 * (rounds + 1) * alpha * -(-n // executors) + 1000,
    ) as collector:
        for batch in collector:
            if batch["policy_version"][0, 0] < rounds:
                time.sleep(LEARNER * alpha * mean_s)
        timeline = collector.timeline(options.output_dir / "last.json")
    owner = np.arange(n) * executors // n
    work = work_of(timeline, owner, rounds)
    learned = timeline.of(Activity.LEARN)[:rounds]
    learner = (learned["ended"] - learned["began"]) / 1e9
    steps = timeline.of(Activity.STEP)
    duration_s = (learned["ended"][-1] - steps["began"].min()) / 1e9
    made = work > 0
    random, shuffled = np.random.default_rng(0), []
    for _ in range(SHUFFLES):
        mixed = work.copy()
        mixed[made] = random.permutation(work[made])
        shuffled.append(timetable(mixed, lag=lag, learner_time=learner).share_of_ideal)
    with_barrier = timetable(work, lag=1, learner_time=learner, barrier="round")
    return {
        "num_envs": n,
        "alpha": alpha,
        "lag": lag,
        "num_executors": executors,
        "rounds": rounds,
        "mean_step_s": float(work[made].mean()),
        "step_cv": float(work[made].std() / work[made].mean()),
        "steps_per_second": n * alpha * rounds / duration_s,
        "measured": float(work.sum(2).mean(1).sum() / duration_s),
        "recorded": timetable(work, lag=lag, learner_time=learner).share_of_ideal,
        "iid": float(np.mean(shuffled)),
        "barrier": with_barrier.share_of_ideal,
    }


def print_table(points: list[dict[str, Any]]) -> None:
    """All points, and how far off the predictions are."""
    print("| environments | alpha | lag | measured | recorded | i.i.d. | barrier | steps/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for each in points:
        shares = " | ".join(f"{each[k]:.3f}" for k in ("measured", "recorded", "iid", "barrier"))
        print(
            f"| {each['num_envs']} | {each['alpha']} | {each['lag']} | {shares} | "
            f"{each['steps_per_second']:,.0f} |"
        )
    for one, other in (("measured", "recorded"), ("recorded", "iid")):
        off = [each[one] / each[other] - 1 for each in points]
        spread = f"{min(off):+.1%} to {max(off):+.1%}"
        print(f"{one} over {other}: {np.median(off):+.1%} (median), {spread}")


def draw(points: list[dict[str, Any]], title: str, file: Path) -> None:
    """Share against alpha for each number of environments; measured against predicted."""
    sizes = sorted({each["num_envs"] for each in points})
    rows = len(sizes) // 2 + 1  # of two panels, so that text keeps its size on a page
    figure = Figure(figsize=(8, 1.2 + 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    for panel, n in zip(axes, sizes, strict=False):
        for lag in sorted({each["lag"] for each in points}):
            own = [each for each in points if (each["num_envs"], each["lag"]) == (n, lag)]
            if not own:
                continue
            own.sort(key=lambda each: each["alpha"])
            alphas = [each["alpha"] for each in own]
            colour = COLOURS.get(lag, "#7d3c98")
            panel.plot(alphas, [e["measured"] for e in own], "o", color=colour, label=f"lag {lag}")
            panel.plot(alphas, [e["recorded"] for e in own], "-", color=colour, lw=1)
            panel.plot(alphas, [e["iid"] for e in own], ":", color=colour, lw=1.5)
            if lag == 1:
                panel.plot(alphas, [e["barrier"] for e in own], "--", color="#808b96", lw=1)
                executors = own[0]["num_executors"]
                steps = [alpha * n // executors for alpha in alphas]
                claim = [s / rollout_time(executors * s, executors, s) for s in steps]
                panel.plot(alphas, claim, "-.", color="#b7950b", lw=1)
        panel.set_xscale("log", base=2)
        alphas = sorted({each["alpha"] for each in points if each["num_envs"] == n})
        panel.set_xticks(alphas, list(map(str, alphas)))
        panel.set_ylim(0, 1.05)
        panel.set_title(f"{n} environments", fontsize="medium")
        panel.set_xlabel("alpha")
        panel.set_ylabel("steps/s, over those of environments that never wait")
        panel.grid(alpha=0.3)
    for style, colour, label in (
        ("k-", None, "predicted, recorded times"),
        ("k:", None, "predicted, i.i.d."),
        ("--", "#808b96", "predicted, lag 1 with barrier"),
        ("-.", "#b7950b", "Claim 1 (exponential, no learner)"),
    ):
        axes[0].plot([], [], style, label=label, **({"color": colour} if colour else {}))
    figure.legend(
        *axes[0].get_legend_handles_labels(), title=title, loc="outside upper center", ncols=2
    )
    last = axes[len(sizes)]
    for each in points:
        colour = COLOURS.get(each["lag"], "#7d3c98")
        last.plot(each["recorded"], each["measured"], "o", color=colour, ms=4)
    last.plot([0, 1], [0, 1], "k-", lw=0.7)
    last.set_xlabel("predicted from the recorded times")
    last.set_ylabel("measured")
    last.grid(alpha=0.3)
    for empty in axes[len(sizes) + 1 :]:
        empty.remove()
    figure.savefig(file)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--env-id", default=SLEEP, help="by default an environment that sleeps")
    what.add_argument("--record", type=Path, help="football_steps.json, to sleep for its times")
    parser.add_argument("--scenario", help="of the record, if it has several")
    parser.add_argument("--slower", type=positive, help=f"factor on its times ({SLOWER:g})")
    parser.add_argument("--num-envs", type=count, nargs="+", default=[4, 16, 64])
    parser.add_argument("--alpha", type=count, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--lag", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num-executors", type=count, help="by default one per environment")
    parser.add_argument("--mean-ms", type=positive, default=10.0, help="of the sleeping steps (10)")
    parser.add_argument("--seconds", type=positive, default=15.0, help="of each point, about (15)")
    parser.add_argument("--rounds", type=count, default=20, help="of each point, at least (20)")
    return parser


def main() -> None:
    """Measures what is missing, and draws all."""
    parser = make_parser()
    options = parser.parse_args()
    options.recorded_s = recorded_at = None
    if options.record is not None:
        record = read_record(parser, options.record)
        results, recorded_at = record["results"], record["machine"]["time"]
        if options.scenario is None and len(results) > 1:
            parser.error(f"--scenario is missing: {options.record} is of {', '.join(results)}")
        scenario, slower = options.scenario or next(iter(results)), options.slower or SLOWER
        if scenario not in results:
            parser.error(f"--scenario {scenario}: {options.record} is of {', '.join(results)}")
        options.recorded_s = seconds_of(results[scenario], slower)
        options.env_id = f"{scenario}, {slower:g} times as long"
    elif options.scenario is not None or options.slower is not None:
        parser.error("--scenario and --slower are of a --record, which is not given")
    torch.set_num_threads(1)
    make_directory(options.output_dir)
    file = options.output_dir / "theory.json"
    report = {"env_id": options.env_id, "recorded_at": recorded_at}
    if file.exists():
        report = json.loads(file.read_text())
    if (report["env_id"], report.get("recorded_at")) != (options.env_id, recorded_at):
        at = f", recorded at {report['recorded_at']}" if report.get("recorded_at") else ""
        parser.error(f"{file} is of {report['env_id']}{at}: choose another --output-dir")
    given = {name: getattr(options, name) for name in CONDITIONS}
    if (before := report.setdefault("options", given)) != given:
        told = ", ".join(f"--{name.replace('_', '-')} {before[name]}" for name in CONDITIONS)
        parser.error(f"{file} was measured with {told}: choose another --output-dir")
    report.setdefault("machine", machine())
    points: list[dict[str, Any]] = report.setdefault("points", [])
    known = {(each["num_envs"], each["alpha"], each["lag"]) for each in points}
    if options.recorded_s is not None:
        mean_s = float(options.recorded_s.mean())
    elif options.env_id == SLEEP:
        mean_s = options.mean_ms / 1e3
    else:
        mean_s = float(measure_environment(find_environment(options.env_id), 2.0).steps.mean())
    wanted = [(n, a, lag) for n in options.num_envs for a in options.alpha for lag in options.lag]
    with keep_servers():
        for number, point in enumerate(wanted, 1):
            if point in known:
                continue
            n, alpha, lag = point
            print(
                f"[{number}/{len(wanted)}] {n} environments, alpha {alpha}, lag {lag}",
                file=sys.stderr,
                flush=True,
            )
            points.append(measure(options, n, alpha, lag, mean_s))
            points.sort(key=lambda each: (each["num_envs"], each["alpha"], each["lag"]))
            write_json(file, report)
    print_table(points)
    draw(
        points,
        f"{options.env_id}: an update takes {LEARNER} alpha mean steps",
        file.with_suffix(".svg"),
    )


if __name__ == "__main__":
    main()
