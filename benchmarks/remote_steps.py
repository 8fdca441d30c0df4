"""What a step costs that is made in a Ray actor, beside one that is made in the executor.

    python benchmarks/remote_steps.py
    python benchmarks/remote_steps.py --address HEAD:6379 --observation-bytes 28224

Steps of one environment after the other are timed in this process, the first ones left out:
medians, and the 95th percentiles. Then steps of several actors that were begun together, as an
executor begins them: what remains for each. Without ``--address`` a cluster of this machine is
started, and ended. Needs ray.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import _recipes  # noqa: F401  so that the package of this checkout is found
import gymnasium as gym
import numpy as np
from _machine import machine

from torchrl_hts.bench.command_line import count
from torchrl_hts.envs import make_remote

WARM_UP = 50  # steps that aren't measured


class Still(gym.Env[Any, Any]):
    """Does nothing, and observes so many bytes."""

    def __init__(self, observation_bytes: int) -> None:
        self.action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.spaces.Box(0, 255, (observation_bytes,), np.uint8)
        self.observation = np.zeros(observation_bytes, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation, 0.0, False, False, {}


def step_times(envs: list[Any], steps: int) -> np.ndarray:
    """Microseconds of a step of one of them, when all are begun before the first is waited for."""
    for env in envs:
        env.reset(seed=0)
    times = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter_ns()
        if len(envs) > 1:
            for env in envs:
                env.begin_step(1)
        for env in envs:
            env.step(1)
        times.append((time.perf_counter_ns() - began) / 1e3 / len(envs))
    return np.array(times[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", help="of a Ray cluster; by default a new one of this machine")
    parser.add_argument("--observation-bytes", type=count, default=32)
    parser.add_argument("--envs", type=count, default=4, help="that are stepped together")
    parser.add_argument("--steps", type=count, default=1000)
    options = parser.parse_args()

    import ray

    address = options.address
    if address is None:
        ray.init(object_store_memory=200_000_000, include_dashboard=False)
        address = ray.get_runtime_context().gcs_address
    print(machine())
    make = partial(Still, options.observation_bytes)
    remote = [make_remote(make, address=address) for _ in range(options.envs)]
    for name, envs in (("local", [make()]), ("remote", remote[:1]), ("remote, together", remote)):
        times = step_times(envs, options.steps)
        middle, most = np.percentile(times, [50, 95])
        print(f"{name:17} environments {len(envs)}: {middle:7.1f} us per step, 95 % {most:.1f}")
    for env in remote:
        env.close()


if __name__ == "__main__":
    main()
