"""Whether a vector of EnvPool's football is faster than single games, on the same work.

    python benchmarks/football_pool.py

Two ways to play so many games on all cores, in turns: one EnvPool of all of them, with a thread for
each core, whose steps return when the slowest is done; and processes, one for each core, that step
EnvPools of one game one after the other, as executors do. Both play the same scenario with random
actions; resets are part of it, as they are of training. Reported are environment steps per second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import numpy as np
from _machine import machine
from football_steps import SCENARIOS

from torchrl_hts.command_line import count

CORES = len(os.sched_getaffinity(0))
WARM_UP_S = 1.0


def make_pool(scenario: str, num_envs: int, num_threads: int, seed: int) -> Any:
    """EnvPool as it is; episodes that have ended are reset at the next step."""
    import envpool

    name = f"gfootball/{scenario}-v1"
    sizes = {"num_envs": num_envs, "num_threads": num_threads}
    pool = envpool.make(name, env_type="gymnasium", seed=seed, **sizes)
    pool.reset()
    return pool


def vector(scenario: str, num_envs: int, seconds: float) -> float:
    """Steps per second of one pool."""
    pool = make_pool(scenario, num_envs, CORES, seed=0)
    random = np.random.default_rng(0)

    def step() -> int:
        pool.step(random.integers(19, size=num_envs, dtype=np.int32))
        return num_envs

    return rate(step, seconds)


def singles(scenario: str, num_envs: int, first: int, seconds: float) -> float:
    """Steps per second of pools of one game each, in this process."""
    pools = [make_pool(scenario, 1, 1, seed=first + index) for index in range(num_envs)]
    random = np.random.default_rng(first)

    def step() -> int:
        for pool in pools:
            pool.step(random.integers(19, size=1, dtype=np.int32))
        return num_envs

    return rate(step, seconds)


def rate(step: Callable[[], int], seconds: float) -> float:
    """How often per second, after a while to warm up."""
    for limit in (WARM_UP_S, seconds):
        frames, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < limit:
            frames += step()
    return frames / elapsed


def main() -> None:
    """Parses the flags, measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", choices=SCENARIOS, default="academy_3_vs_1_with_keeper")
    parser.add_argument("--num-envs", type=count, nargs="+", default=[4, 8, 16])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (8)")
    parser.add_argument("--repetitions", type=count, default=3, help="of each (3)")
    options = parser.parse_args()
    if find_spec("envpool") is None:
        parser.error("EnvPool is not installed: pip install 'torchrl_hts[envpool]'")
    for name, value in machine().items():
        print(f"{name}: {value}")
    print("\n| games | one pool, steps/s | single games, steps/s | pool over single |")
    print("| --- | --- | --- | --- |")
    context = get_context("spawn")  # each measurement has processes of its own
    for num_envs in options.num_envs:
        pools, alone = [], []
        shares = [num_envs // CORES + (core < num_envs % CORES) for core in range(CORES)]
        for _ in range(options.repetitions):
            with ProcessPoolExecutor(1, context) as one:
                result = one.submit(vector, options.scenario, num_envs, options.seconds)
                pools.append(result.result())
            with ProcessPoolExecutor(CORES, context) as several:
                parts = [
                    several.submit(singles, options.scenario, share, 100 * core, options.seconds)
                    for core, share in enumerate(shares)
                    if share
                ]
                alone.append(sum(part.result() for part in parts))
        ratio = statistics.median(p / a for p, a in zip(pools, alone, strict=True))
        print(
            f"| {num_envs} | {statistics.median(pools):.0f} | {statistics.median(alone):.0f} | "
            f"{ratio:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
