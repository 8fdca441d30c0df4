"""Environments that wait: a process for each of them, or a thread.

    python benchmarks/waiting_environments.py
    python benchmarks/waiting_environments.py --envs 16 64 256 --rounds 10

Environments sleep, for times that are exponential, with actions that are drawn at random. With
processes each has an executor of its own; with threads, by `make_in_thread`, all have one. Prints
medians of turns: seconds to the first batch, steps/s, microseconds of processor time for a step,
and what all processes hold. The share is that of the steps that they make if nobody ever waits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from itertools import product

import _recipes  # noqa: F401  so that the package of this checkout is found
from _environments import SleepEnv
from _machine import machine
from _processes import memory_mib
from _processor_time import used_s

from torchrl_hts import HTSCollector
from torchrl_hts.bench.command_line import count, positive
from torchrl_hts.envs import make_in_thread

ALPHA, WARM_UP = 20, 2  # steps and rounds
KINDS = ("processes", "threads")


def measure(kind: str, num_envs: int, rounds: int, mean_s: float) -> list[float]:
    """One run; what is printed of it, in this order."""
    factories = [partial(SleepEnv, env, mean_s=mean_s) for env in range(num_envs)]
    if kind == "threads":
        factories = [partial(make_in_thread, factory) for factory in factories]
    executors = num_envs if kind == "processes" else 1
    began = time.perf_counter()
    with HTSCollector(
        factories, None, frames_per_batch=num_envs * ALPHA, num_executors=executors, seed=0
    ) as collector:
        batches = iter(collector)
        next(batches)
        start_s = time.perf_counter() - began
        for _ in range(WARM_UP):
            next(batches)
        before, began = used_s(collector.worker_pids()), time.perf_counter()
        for _ in range(rounds):
            next(batches)
        took_s, after = time.perf_counter() - began, used_s(collector.worker_pids())
        steps = rounds * num_envs * ALPHA
        cpu_s = sum(after[each] - before[each] for each in ("executor", "actor", "learner"))
        share = steps / took_s * mean_s / num_envs
        return [start_s, steps / took_s, share, 1e6 * cpu_s / steps, memory_mib(os.getpid())]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--envs", type=count, nargs="+", default=[16, 64, 256])
    parser.add_argument("--mean-ms", type=positive, default=50.0, help="of a step (50)")
    parser.add_argument("--rounds", type=count, default=10, help="of 20 steps, each turn (10)")
    parser.add_argument("--turns", type=count, default=3)
    options = parser.parse_args()
    print(machine())
    print("| environments | in | start, s | steps/s | share | us of a step | MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for num_envs in options.envs:
        found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
        for _, kind in product(range(options.turns), KINDS):
            found[kind].append(measure(kind, num_envs, options.rounds, options.mean_ms / 1e3))
        for kind, runs in found.items():
            start_s, speed, share, cpu_us, mib = map(statistics.median, zip(*runs, strict=True))
            print(
                f"| {num_envs} | {kind} | {start_s:.1f} | "
                f"{speed:,.0f} | {share:.2f} | {cpu_us:.0f} | {mib:,.0f} |"
            )


if __name__ == "__main__":
    main()
