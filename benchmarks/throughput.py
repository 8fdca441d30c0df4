"""Steps per second of HTSCollector and of what else there is, on the same work in one run.

    python benchmarks/throughput.py --output-dir runs/throughput
    python benchmarks/throughput.py --workloads pong --trainings a2c5 --contenders hts loop-ale sb3
    python benchmarks/throughput.py --workloads sleep --trainings collect --num-envs 4 16 64

Contenders and workloads take turns, repetition by repetition, so that a machine that is busy for a
while is busy for all of them; tables show medians. Each measurement is a process of its own,
because ParallelEnv and TorchRL's multi-process collectors set the thread count of the process they
are made in and leave it there. Starting up and the first batches are not counted.

All contenders run the same network, settings and preprocessing, on batches of the same number of
steps. The A2C update is that of recipes/a2c_atari.py, which runs the shared trunk once. With the
suffix -stock (multi-async-stock, hts-stock, ...) it is what TorchRL's A2CLoss and GAE do by
themselves with a shared trunk. Where contenders gather and learn in turns, or learning is most of
the work (PPO), the learner has a thread for each core; else one. TorchRL's multi-process collectors
get a worker per environment where environments sleep, and elsewhere a worker per core with the
environments shared out among them. A worker of multi-async fills a batch by itself, so that of two
workers each makes twice as many steps of half of the environments. The table tells the shape.
The contender hts-barrier is HTSCollector where everybody waits for the slowest at the end of each
round, as in the paper. Two more are HTSCollector too: hts-timeline takes down what
collector.timeline draws, and hts-two-actors has two actors in any case. Of the others sb3 is
Stable-Baselines3, and loop-envpool EnvPool in a plain loop. Loops over PufferLib's vectorisation
are loop-puffer, in processes, and loop-puffer-serial, in this one. The last, sample-factory, is
Sample Factory's APPO, with its own loss and optimizer. In what it differs is told in
_sample_factory.py. `make contenders` makes an environment that has them.

Writes measurements.json after each measurement, so that a run that was stopped goes on where it
was; Ctrl-C shows what there is. A directory holds what was measured at one commit, on one machine,
with the same versions, kernels and settings, and refuses the rest. Draws all that is in it:
throughput.svg always. Where a line has more than one point, scaling.svg is against the number of
environments, and variation.svg against how much the times of the workloads that sleep vary. The
workload startup is the start of 16 executors of Pong: time until they are ready, their private
memory, the CPU time they use while idle. It has a file of its own, startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

from _contenders import (
    CPU_ONLY,
    DEFAULT_CONTENDERS,
    NAMES,
    PACKAGES,
    SAMPLE_FACTORY,
    lacking,
    make_runner,
)
from _machine import essentials, machine
from _measurements import Measurements, Record, has_failed, keep_others_out
from _measuring import measure_parts, measure_runner, run_alone, run_together
from _readme import print_readme, rows_that_run
from _recipes import HERE
from _report import (
    PARTS,
    Cell,
    cell_of,
    cells_of,
    draw_bars,
    draw_scaling,
    draw_variation,
    print_table,
)
from _workloads import TRAININGS, WORKLOADS, find_workload

from torchrl_hts.bench.command_line import count, make_directory, positive

STARTUP, RUNS = "startup", Path("runs")
STARTUP_EXECUTORS = 16
# What torchrl_hts.keep_large_blocks does, for all that is started: Sample Factory's learner too.
KEEP_BLOCKS = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
DEFAULT_CELLS = [
    Cell("sleep", "collect", 16),
    Cell("costless", "collect", 16),
    Cell("pong", "a2c5", 16),
    Cell("pong", "a2c20", 16),
]


def print_startup(runs: list[Record]) -> None:
    """Medians of the start-up workload."""
    print(
        f"\nstartup: {STARTUP_EXECUTORS} Pong executors, from a script that imports torch and has "
        "no main guard"
    )
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


def workload(name: str) -> str:
    """The name of a workload, checked."""
    try:
        if name != STARTUP:
            find_workload(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error) from None
    return name


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Tell of options that don't fit each other, and set what others imply."""
    if options.workloads is None and (options.trainings or options.num_envs):
        parser.error("--trainings and --num-envs are of --workloads: name some")
    if options.readme:
        if options.workloads or options.contenders is not None:
            parser.error("--readme says which --workloads and --contenders are measured: name none")
        options.keep_large_blocks = True
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options.output_dir = options.output_dir or RUNS / ("readme" if options.readme else "throughput")
    on_cpu = options.device == "cpu"
    if not on_cpu and (options.readme or CPU_ONLY & {*(options.contenders or ())}):
        parser.error(f"--device: {' and '.join(sorted(CPU_ONLY))} are measured on the CPU alone")
    options.contenders = options.contenders or [
        name for name in DEFAULT_CONTENDERS if on_cpu or name not in CPU_ONLY
    ]
    for contender in lacking() & {*options.contenders}:
        package, how = PACKAGES[contender]
        parser.error(f"--contenders {contender} needs the package {package}: {how}")
    if SAMPLE_FACTORY in options.contenders and options.learner_threads not in (None, 1):
        parser.error(f"--learner-threads must be 1 with {SAMPLE_FACTORY}: it learns with one")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cells = ", ".join(f"{cell.workload}/{cell.training}" for cell in DEFAULT_CELLS)
    parser.add_argument(
        "--workloads",
        nargs="+",
        type=workload,
        metavar="NAME",
        help=f"of {', '.join(WORKLOADS)}, {STARTUP}, ids of games of ALE, and football's such as "
        f"gfootball/academy_3_vs_1_with_keeper; by default {cells} and {STARTUP}",
    )
    parser.add_argument(
        "--trainings",
        nargs="+",
        choices=[*TRAININGS],
        metavar="NAME",
        help=f"of {', '.join(TRAININGS)} (collect)",
    )
    parser.add_argument("--num-envs", nargs="+", type=count, help="environments (16)")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; by default {' '.join(DEFAULT_CONTENDERS)}",
    )
    parser.add_argument("--seconds", type=positive, default=15.0, help="of each measurement (15)")
    parser.add_argument("--repetitions", type=count, default=3, help="of each contender (3)")
    parser.add_argument("--warm-up", type=count, default=3, help="batches not counted (3)")
    parser.add_argument(
        "--learner-threads",
        type=count,
        help="of torch in the learner, whatever the contender; by default as told above",
    )
    parser.add_argument(
        "--device", default="cpu", help="where batches lie and are learned from, such as cuda"
    )
    parser.add_argument(
        "--policy-device",
        default="cpu",
        help="where HTSCollector's actors run the policy, such as cuda; the policy of others runs "
        "where the learner does",
    )
    parser.add_argument(
        "--keep-large-blocks", action="store_true", help="in all processes of all contenders"
    )
    parser.add_argument(
        "--readme",
        action="store_true",
        help="measure what the README's table shows, with what is installed, and print the table; "
        "blocks are kept, and OpenMP's threads wait passively",
    )
    where = "by default runs/throughput, or runs/readme with --readme"
    parser.add_argument("--output-dir", type=Path, help=where)
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    check(options, parser)
    return options


def alone(options: argparse.Namespace) -> None:
    """One measurement, in this process."""
    contender, *names, number = options.alone
    num_envs = int(number)
    if contender == "parts":
        result = measure_parts(*names, num_envs, options.seconds, options.warm_up)
    elif contender == SAMPLE_FACTORY:
        from _sample_factory import measure_sample_factory  # an optional package

        result = measure_sample_factory(*names, num_envs, options.seconds, options.warm_up)
    else:
        runner = make_runner(
            contender,
            *names,
            num_envs,
            options.learner_threads,
            options.device,
            options.policy_device,
        )
        result = measure_runner(runner, options.seconds, options.warm_up)
    print(json.dumps(result))


def say(*words: object) -> None:
    """Show what is measured now."""
    print(f"[{', '.join(map(str, words))}]", file=sys.stderr, flush=True)


def asked_for(options: argparse.Namespace) -> tuple[dict[Cell, list[str]], bool]:
    """The contenders of each cell that is asked for, and whether the start-up is too."""
    if options.readme:
        return {row.cell: ["hts", *row.others] for row in rows_that_run(lacking())}, False
    cells, with_startup = DEFAULT_CELLS, True
    if options.workloads is not None:
        chosen = [name for name in options.workloads if name != STARTUP]
        trainings, num_envs = options.trainings or ["collect"], options.num_envs or [16]
        cells = [Cell(*each) for each in product(chosen, trainings, num_envs)]
        with_startup = STARTUP in options.workloads
    return dict.fromkeys(cells, options.contenders), with_startup


def measure(
    options: argparse.Namespace,
    contenders: dict[Cell, list[str]],
    with_startup: bool,
    measurements: Measurements,
    starts: Measurements,
) -> None:
    """Measure what is missing, each in a process of its own."""
    limit_s = 300 + 4 * options.seconds
    script = [str(HERE / "throughput.py"), "--seconds", str(options.seconds)]
    script += ["--warm-up", str(options.warm_up)]
    if options.learner_threads is not None:
        script += ["--learner-threads", str(options.learner_threads)]
    script += ["--device", options.device, "--policy-device", options.policy_device]
    script += ["--alone"]
    for repetition, (cell, named) in product(range(options.repetitions), contenders.items()):
        arguments = [cell.workload, cell.training, str(cell.num_envs)]
        # Parts are timed on the CPU: elsewhere they would be those of something else.
        elsewhere = (options.device, options.policy_device) != ("cpu", "cpu")
        parts = [] if elsewhere or find_workload(cell.workload).waits else [*PARTS]
        for each in [*parts, *named]:
            key = {**cell._asdict(), "contender": each, "repetition": repetition}
            if measurements.has(key):
                continue
            say(*cell, each, repetition + 1)
            if each in PARTS:
                runs = run_together([*script, "parts", *arguments], PARTS[each].copies, limit_s)
                measurements.add(key, {"runs": runs})
            else:
                measurements.add(key, run_alone([*script, each, *arguments], limit_s))
    if with_startup:
        for repetition in range(options.repetitions):
            key = {"repetition": repetition}
            if not starts.has(key):
                say(STARTUP, repetition + 1)
                script = [str(HERE / "_startup.py"), str(STARTUP_EXECUTORS)]
                starts.add(key, run_alone(script, limit_s))


def main() -> None:
    """Parses the flags, measures what is missing, and shows all."""
    options = parse()
    if options.alone is not None:
        alone(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with all it started
    if options.keep_large_blocks:
        os.environ.update(KEEP_BLOCKS)
    contenders, with_startup = asked_for(options)
    make_directory(options.output_dir)
    keep_others_out(options.output_dir)
    conditions: dict[str, Any] = {
        **essentials(),
        "learner_threads": options.learner_threads,
        **({"device": options.device} if options.device != "cpu" else {}),
        **({"policy_device": options.policy_device} if options.policy_device != "cpu" else {}),
        "seconds": options.seconds,
        "warm_up": options.warm_up,
        "keep_large_blocks": options.keep_large_blocks,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
    }
    measurements = Measurements(options.output_dir / "measurements.json", conditions)
    starts = Measurements(options.output_dir / "startup.json", conditions)
    for name, value in machine().items():
        print(f"{name}: {value}")
    interrupted = False
    try:
        measure(options, contenders, with_startup, measurements, starts)
    except KeyboardInterrupt:
        interrupted = True
    measured = cells_of(measurements.records)
    for cell in contenders:
        if cell in measured:
            print_table(measurements.records, cell)
    if starts.records:
        print_startup(starts.records)
    if options.readme:
        print_readme(measurements.records, lacking())
    print(f"\nload average at the end: {os.getloadavg()}")
    if measured:
        draw_bars(measurements.records, options.output_dir / "throughput.svg")
        draw_scaling(measurements.records, options.output_dir / "scaling.svg")
        draw_variation(measurements.records, options.output_dir / "variation.svg")
    if interrupted:
        raise SystemExit("interrupted: the same command goes on with what is missing")
    results = [
        record
        for record in measurements.records
        if record["contender"] in [*PARTS, *contenders.get(cell_of(record), [])]
        and cell_of(record) in contenders
    ]
    if with_startup:
        results += starts.records
    if failed := sum(map(has_failed, results)):
        raise SystemExit(f"error: {failed} of {len(results)} measurements failed, as told above")


if __name__ == "__main__":
    main()
