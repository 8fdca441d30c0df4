"""Steps/s of two recipes beside TorchRL's own collectors, with the same networks, loss and updates.

    python benchmarks/recipe_speeds.py control
    python benchmarks/recipe_speeds.py teams

`control` is recipes/ppo_mujoco.py: PPO on HalfCheetah-v5 with 8 environments. TorchRL's PPO for
MuJoCo has one environment in the learner's process, with the transform VecNorm; here it is
VecNormV2, which has taken its place. `teams` is recipes/mappo.py: 60 environments of VMAS's
navigation, which TorchRL's tutorial steps as one batch in the learner's process.

All contenders are started at once, each in a process of its own. They take turns: one collects and
learns for a number of batches, and the others wait. Prints medians over the turns, with the least
and the most, and the median of the ratio to the contender that is named last, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import _recipes  # noqa: F401  so that the recipes are found
import mappo
import torch
from _machine import machine
from _ppo_learners import Learner, control_learner, team_learner
from support.continuous import make_continuous
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import (
    ClipTransform,
    Compose,
    DoubleToFloat,
    EnvBase,
    GymWrapper,
    ParallelEnv,
    TransformedEnv,
    VecNormV2,
)

from torchrl_hts import HTSCollector, World
from torchrl_hts.bench.command_line import count

_WARM_UP = 2  # turns of each that aren't counted
_ENVS, _ALPHA = 8, 256  # of control
_TASK = "HalfCheetah-v5"


@dataclass(frozen=True)
class Contender:
    """Who collects.

    Attributes:
        label: for the table.
        start: makes the learner and the collector, which the exit stack closes.
        threads: of the learner's process.
    """

    label: str
    start: Callable[[ExitStack], tuple[Learner, Any]]
    threads: int = 1


def normalised() -> EnvBase:
    """An environment as TorchRL's PPO for MuJoCo has it."""
    env = GymWrapper(make_continuous(_TASK))
    transforms: list[Any] = [
        DoubleToFloat(in_keys=["observation"]),
        VecNormV2(in_keys=["observation"]),
        ClipTransform(in_keys=["observation"], low=-10, high=10),
    ]
    return TransformedEnv(env, Compose(*transforms))


def _world(stack: ExitStack, threads: int = 1) -> World:
    return stack.enter_context(World(threads=threads))


def control_hts(lag: int, stack: ExitStack) -> tuple[Learner, HTSCollector]:
    """The recipe."""
    learner = control_learner(_TASK, _world(stack), lag=lag, num_envs=_ENVS)
    envs = [partial(make_continuous, _TASK)] * _ENVS
    return learner, _hts(stack, envs, learner, _ENVS * _ALPHA)


def control_torchrl(envs: int, threads: int, stack: ExitStack) -> tuple[Learner, Collector]:
    """TorchRL's collector over one environment, or over processes of one each."""
    learner = control_learner(
        _TASK,
        _world(stack, threads),
        lag=None,
        normalises_observations=False,
        normalises_rewards=False,
    )
    make_env = normalised if envs == 1 else partial(ParallelEnv, envs, normalised)
    return learner, _torchrl(stack, make_env, learner, _ENVS * _ALPHA, threads)


def teams_hts(lag: int, stack: ExitStack) -> tuple[Learner, HTSCollector]:
    """The recipe."""
    options = mappo.Options()
    learner = team_learner(options, _world(stack), lag=lag)
    envs = [mappo.batches_of(options)] * options.num_batches
    return learner, _hts(stack, envs, learner, options.num_envs * options.sync_interval)


def teams_torchrl(threads: int, stack: ExitStack) -> tuple[Learner, Collector]:
    """TorchRL's collector over all environments as one batch, as in its tutorial."""
    options = mappo.Options(num_batches=1)
    learner = team_learner(options, _world(stack, threads), lag=None)
    frames = options.num_envs * options.sync_interval
    return learner, _torchrl(stack, mappo.batches_of(options), learner, frames, threads)


def _hts(stack: ExitStack, envs: list[Any], learner: Learner, frames: int) -> HTSCollector:
    assert learner.lag is not None
    return stack.enter_context(
        HTSCollector(
            envs, learner.policy, frames_per_batch=frames, total_frames=-1, lag=learner.lag, seed=0
        )
    )


def _torchrl(
    stack: ExitStack, make_env: Callable[[], EnvBase], learner: Learner, frames: int, threads: int
) -> Collector:
    collector = Collector(make_env, learner.policy, frames_per_batch=frames, total_frames=-1)
    stack.callback(collector.shutdown)
    torch.set_num_threads(threads)  # which ParallelEnv sets to 1
    return collector


CONTENDERS = {
    "control": [
        Contender("`HTSCollector`, lag 1", partial(control_hts, 1)),
        Contender("`HTSCollector`, lag 0", partial(control_hts, 0)),
        Contender("`Collector`, `ParallelEnv` of 8", partial(control_torchrl, 8, 1)),
        Contender("`Collector`, one environment", partial(control_torchrl, 1, 1)),
    ],
    "teams": [
        Contender("`HTSCollector`, 4 batches of 15, lag 1", partial(teams_hts, 1)),
        Contender("`HTSCollector`, 4 batches of 15, lag 0", partial(teams_hts, 0)),
        Contender("`Collector`, a batch of 60, 2 threads", partial(teams_torchrl, 2), 2),
        Contender("`Collector`, a batch of 60", partial(teams_torchrl, 1)),
    ],
}


def take_turns(workload: str, number: int, connection: Connection) -> None:
    """Answers each number of batches with the steps/s that it has collected and learned them at."""
    contender = CONTENDERS[workload][number]
    torch.manual_seed(0)
    torch.set_num_threads(contender.threads)
    with ExitStack() as stack:
        learner, collector = contender.start(stack)
        batches = iter(collector)
        while batch_count := connection.recv():
            connection.send(turn(batches, learner, collector, batch_count))


def turn(
    batches: Iterator[TensorDictBase], learner: Learner, collector: Any, batch_count: int
) -> float:
    """Steps/s of so many batches, after one that is not counted: what ran ahead in the pause."""
    frames, began = 0, 0.0
    for number in range(batch_count + 1):
        batch = next(batches)
        learner.learn(batch)
        collector.update_policy_weights_()
        if number == 0:
            began = time.perf_counter()
        else:
            frames += batch["next", "done"].numel()
    return frames / (time.perf_counter() - began)


def measure(workload: str, turns: int, batch_count: int) -> list[list[float]]:
    """The steps/s of each contender in each turn."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for number in range(len(CONTENDERS[workload])):
        ours, theirs = context.Pipe()
        process = context.Process(target=take_turns, args=(workload, number, theirs))
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    speeds: list[list[float]] = [[] for _ in ends]
    try:
        for which in range(_WARM_UP + turns):
            for number, end in enumerate(ends):
                end.send(batch_count if which >= _WARM_UP else 1)
                speed = end.recv()
                print(f"{which} {number}: {speed:,.0f}", file=sys.stderr, flush=True)
                if which >= _WARM_UP:
                    speeds[number].append(speed)
        for end in ends:
            end.send(0)
    except EOFError:
        raise SystemExit("error: a contender has ended; see above") from None
    finally:
        for end, process in zip(ends, processes, strict=True):
            end.close()
            process.join()
    return speeds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=CONTENDERS)
    parser.add_argument("--turns", type=count, default=5, help="of each contender (5)")
    parser.add_argument("--batches", type=count, default=1, help="of each turn (1)")
    given = parser.parse_args()
    print(json.dumps(machine()))
    speeds = measure(given.workload, given.turns, given.batches)
    print("| | steps/s, median | least to most | ratio |")
    print("| --- | --- | --- | --- |")
    for contender, own in zip(CONTENDERS[given.workload], speeds, strict=True):
        ratio = statistics.median(a / b for a, b in zip(own, speeds[-1], strict=True))
        middle = statistics.median(own)
        span = f"{min(own):,.0f}-{max(own):,.0f}"
        print(f"| {contender.label} | {middle:,.0f} | {span} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
