"""Steps per second of remote environments with uneven steps, by the number of executors.

    python benchmarks/remote_executors.py
    python benchmarks/remote_executors.py --address HEAD:6379 --envs 32 --executors 1 4 32

Each environment sleeps in a Ray actor of its own, for times that are exponential. An executor has
several of them, all of which step at the same time. Prints steps/s, and their share of what the
environments make if nobody ever waits, in turns: medians. Without ``--address`` a cluster of this
machine is started, and ended. Needs ray.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import _environments
import _recipes  # noqa: F401  so that the package of this checkout is found
import cloudpickle
from _environments import SleepEnv
from _machine import machine

from torchrl_hts import HTSCollector
from torchrl_hts.bench.command_line import count, positive
from torchrl_hts.envs import make_remote

ALPHA, WARM_UP = 20, 2  # steps and rounds


def measure(options: argparse.Namespace, address: str, num_executors: int) -> float:
    """Steps per second with so many executors; actions are drawn at random."""
    num_envs, mean_s = options.envs, options.mean_ms / 1e3
    factories = [
        partial(make_remote, partial(SleepEnv, env, mean_s=mean_s), address=address, num_cpus=0)
        for env in range(num_envs)
    ]
    with HTSCollector(
        factories, None, frames_per_batch=num_envs * ALPHA, num_executors=num_executors, seed=0
    ) as collector:
        batches = iter(collector)
        for _ in range(WARM_UP):
            next(batches)
        began = time.perf_counter()
        for _ in range(options.rounds):
            next(batches)
        return options.rounds * num_envs * ALPHA / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", help="of a Ray cluster; by default a new one of this machine")
    parser.add_argument("--envs", type=count, default=8)
    parser.add_argument("--executors", type=count, nargs="+", default=[1, 2, 8])
    parser.add_argument("--mean-ms", type=positive, default=50.0, help="of a step (50)")
    parser.add_argument("--rounds", type=count, default=10, help="of 20 steps, each turn (10)")
    parser.add_argument("--turns", type=count, default=3)
    options = parser.parse_args()
    if max(options.executors) > options.envs:
        parser.error("--executors can't be more than --envs")

    import ray

    cloudpickle.register_pickle_by_value(_environments)  # actors can't import it
    address = options.address
    if address is None:
        ray.init(object_store_memory=200_000_000, include_dashboard=False)
        address = ray.get_runtime_context().gcs_address
    print(machine())
    found: dict[int, list[float]] = {number: [] for number in options.executors}
    for _ in range(options.turns):
        for number, speeds in found.items():
            speeds.append(measure(options, address, number))
    most = options.envs / (options.mean_ms / 1e3)
    for number, speeds in found.items():
        speed = statistics.median(speeds)
        print(f"{number:3} executors: {speed:7.1f} steps/s, {speed / most:.2f} of {most:.0f}")


if __name__ == "__main__":
    main()
