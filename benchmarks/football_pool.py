"""What it is worth that the EnvPool games of an executor share one pool.

    python benchmarks/football_pool.py

Two ways to play the same games in HTSCollector, in turns. The first is as `make_football` makes
them: the games of an executor are one pool, whose thread plays while the executor looks at what is
there. The second has each behind a wrapper that does nothing, so that executors step pools of one
game one after the other. Batches are equal bit for bit. Resets are part of it. Reported are
environment steps per second, and the median over the turns of one by the other.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
from _contenders import CONTENDERS, CollectorRunner
from _machine import machine
from _measuring import measure_runner
from _workloads import TRAININGS, Workload
from football_steps import SCENARIOS

from torchrl_hts.bench.command_line import count, positive
from torchrl_hts.envs import make_football

WARM_UP = 3  # batches


def make_alone(scenario: str) -> gym.Env[Any, Any]:
    """A game that its executor steps by itself."""
    return gym.Wrapper(make_football(scenario, engine="envpool"))


def measure(
    make_env: Callable[[], gym.Env[Any, Any]], training: str, num_envs: int, seconds: float
) -> float:
    """Steps per second after the warm-up."""
    workload = Workload("football", lambda number: [make_env] * number)
    contender = CONTENDERS["hts"]
    runner = CollectorRunner(contender, workload, TRAININGS[training], num_envs, stock=False)
    return float(measure_runner(runner, seconds, WARM_UP)["steps_per_second"])


def main() -> None:
    """Parses the flags, measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", choices=SCENARIOS, default="academy_3_vs_1_with_keeper")
    parser.add_argument("--trainings", choices=TRAININGS, nargs="+", default=["collect", "a2c20"])
    parser.add_argument("--num-envs", type=count, nargs="+", default=[16])
    parser.add_argument("--seconds", type=positive, default=10.0, help="of each measurement (10)")
    parser.add_argument("--repetitions", type=count, default=6, help="of each (6)")
    options = parser.parse_args()
    if find_spec("envpool") is None:
        parser.error("EnvPool is not installed: pip install 'torchrl_hts[envpool]'")
    for name, value in machine().items():
        print(f"{name}: {value}")
    print("\n| training | games | shared pools, steps/s | single games, steps/s | ratio | ratios |")
    print("| --- | --- | --- | --- | --- | --- |")
    ways = [partial(make_football, options.scenario, engine="envpool")]
    ways.append(partial(make_alone, options.scenario))
    for training in options.trainings:
        for num_envs in options.num_envs:
            found: list[list[float]] = [[], []]
            for repetition in range(options.repetitions):
                for way in (0, 1) if repetition % 2 else (1, 0):
                    found[way].append(measure(ways[way], training, num_envs, options.seconds))
            ratios = sorted(p / s for p, s in zip(*found, strict=True))
            shared, single = map(statistics.median, found)
            print(
                f"| {training} | {num_envs} | {shared:.0f} | {single:.0f} | "
                f"{statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
