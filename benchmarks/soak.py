"""Trains CartPole while workers are killed, stopped and made to fail, for as long as one likes.

    python benchmarks/soak.py --minutes 60

Half of the environments are disturbed, each in an executor of its own; so are the actors. The
faults, drawn with a fixed seed: SIGKILL, SIGSTOP and SIGCONT a moment later, exceptions, and steps
that take long. The other half is left alone, and the learner learns from it. Then the same rounds
are collected once more without any fault. The run passes if

- no row that the learner was handed is torn: every observation carries a checksum of itself, of
  the one before and of the action between them;
- the rows of the environments that were left alone, and the parameters, are bit for bit those of
  the undisturbed run;
- the main process has as many file descriptors at the end as at the beginning, and no child.

It prints one line per minute, and what it has counted as JSON at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _recipes  # noqa: F401  so that the package of this checkout is found
import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn import TensorDictModule as Mod
from torch import nn
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, EpisodeReturns, HTSCollector

NUM_ENVS, SYNC_INTERVAL = 8, 32
DISTURBED = range(NUM_ENVS // 2)
LEFT_ALONE = list(range(NUM_ENVS // 2, NUM_ENVS))
ACTORS = 2


class Checked(gym.Wrapper[Any, Any, Any, Any]):
    """Observations that carry checksums; some steps raise, or take long.

    Args:
        env: with a Box as its observation space and Discrete actions.
        faults: whether steps raise.
    """

    def __init__(self, env: gym.Env[Any, Any], *, faults: bool) -> None:
        super().__init__(env)
        checksum = gym.spaces.Box(0, 2**32 - 1, (1,), np.int64)
        spaces = {"observation": env.observation_space, "checksum": checksum}
        self.observation_space = gym.spaces.Dict(spaces)
        self.faults = faults

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.draw = random.Random(seed)
        observation, info = self.env.reset(seed=seed, options=options)
        self.before = observation
        return {"observation": observation, "checksum": checksum_of(observation)}, info

    def step(self, action: Any) -> Any:
        chance = self.draw.random()
        if self.faults and chance < 1e-4:
            raise RuntimeError("an engine that fails now and then")
        if chance > 1 - 1e-3:
            time.sleep(0.02)
        observation, *rest = self.env.step(action)
        checksum = checksum_of(self.before, action, observation)
        self.before = observation
        return {"observation": observation, "checksum": checksum}, *rest


def checksum_of(*parts: Any) -> np.ndarray[Any, Any]:
    """A checksum over numbers and arrays."""
    return np.array([zlib.crc32(b"".join(np.asarray(part).tobytes() for part in parts))])


def torn_rows(batch: TensorDictBase) -> int:
    """How many transitions don't hang together."""
    before, after = (td["observation"].reshape(-1, 4).numpy() for td in (batch, batch["next"]))
    actions = batch["action"].reshape(-1).numpy()
    found = batch["next", "checksum"].reshape(-1).numpy()
    expected = (checksum_of(*row)[0] for row in zip(before, actions, after, strict=True))
    return sum(int(one != other) for one, other in zip(found, expected, strict=True))


def make_env(*, faults: bool) -> gym.Env[Any, Any]:
    return Checked(gym.make("CartPole-v1"), faults=faults)


def make_networks(seed: int) -> tuple[nn.Module, nn.Module]:
    """Policy and value of CartPole."""
    torch.manual_seed(seed)

    def net(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))

    policy = ProbabilisticTensorDictSequential(
        Mod(net(2), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )  # fmt: skip
    return policy, Mod(net(1), ["observation"], ["state_value"])


class Disturber(threading.Thread):
    """Kills and stops workers at random moments.

    Args:
        collector: whose workers it disturbs.
        seed: of what it draws.
        mean_s: mean time between two faults.
    """

    def __init__(self, collector: HTSCollector, seed: int, mean_s: float) -> None:
        super().__init__(daemon=True)
        self.collector, self.mean_s = collector, mean_s
        self.draw = random.Random(seed)
        self.done = threading.Event()
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        names = [f"executor {i}" for i in DISTURBED] + [f"actor {i}" for i in range(ACTORS)]
        while not self.done.wait(self.draw.expovariate(1 / self.mean_s)):
            name, fault = self.draw.choice(names), self.draw.choice(["kill", "stop"])
            pause_s = self.draw.uniform(0.05, 0.5)
            pid = self.collector.worker_pids()[name]
            try:
                if fault == "kill":
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGSTOP)
                    self.done.wait(pause_s)
                    os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:  # it has failed just now
                continue
            self.counts[fault] += 1


def train(
    seed: int, go_on: Callable[[int], bool], mean_s: float | None
) -> tuple[list[str], dict[str, Any]]:
    """Train while ``go_on(round)``; returns a digest per round, and what was counted.

    Args:
        mean_s: mean time between two faults; None for no fault at all.
    """
    policy, value = make_networks(seed)
    loss_module = A2CLoss(policy, value, entropy_coeff=0.01)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=value)
    optimizer = torch.optim.Adam(loss_module.parameters(), 1e-3)
    returns, digests = EpisodeReturns(window=50), []
    counted: dict[str, Any] = {"torn_rows": 0, "frames": 0}
    disturbed = mean_s is not None
    envs = [partial(make_env, faults=disturbed and env in DISTURBED) for env in range(NUM_ENVS)]
    with HTSCollector(
        envs, policy, frames_per_batch=NUM_ENVS * SYNC_INTERVAL, seed=seed, lag=1,
        num_executors=NUM_ENVS, num_actors=ACTORS, on_executor_failure="restart",
        max_restarts=10**6, timeout_s=60.0,
    ) as collector:  # fmt: skip
        delayed = DelayedGradient(loss_module, lag=collector.lag)
        disturber = Disturber(collector, seed, mean_s) if mean_s is not None else None
        if disturber is not None:
            disturber.start()
        said = time.monotonic()
        for round_, batch in enumerate(collector):
            counted["torn_rows"] += torn_rows(batch)
            own = batch[LEFT_ALONE]
            returns.update(own)
            digest = hashlib.sha256()
            for key in sorted(own.keys(True, True), key=str):
                digest.update(own[key].contiguous().numpy().tobytes())
            with delayed:
                advantage(own)
                losses = loss_module(own.reshape(-1))
                sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
                optimizer.step()
                optimizer.zero_grad()
            for parameter in policy.parameters():
                digest.update(parameter.detach().numpy().tobytes())
            digests.append(digest.hexdigest())
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(f"round {round_}: return {returns.mean:.1f}, {memory()}", flush=True)
            if not go_on(round_):
                break
        if disturber is not None:
            disturber.done.set()
            disturber.join()
            counted["signals"] = dict(disturber.counts)
        statistics = collector.statistics()
        counted["frames"] = statistics.frames
        counted["executor_restarts"] = statistics.executor_restarts
        counted["actor_restarts"] = statistics.actor_restarts
        counted["mean_return"] = returns.mean
    return digests, counted


def memory() -> str:
    """What this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return f"{pages * os.sysconf('SC_PAGESIZE') >> 20} MiB, {descriptors()} descriptors"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds-between-faults", type=float, default=5.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a worker is replaced", RuntimeWarning)
    before = descriptors()
    end = time.monotonic() + 60 * arguments.minutes
    digests, result = train(
        arguments.seed, lambda round_: time.monotonic() < end, arguments.seconds_between_faults
    )
    print(f"{len(digests)} rounds; now the same without faults", flush=True)
    calm, _ = train(arguments.seed, lambda round_: round_ + 1 < len(digests), None)
    result["rounds"] = len(digests)
    result["rounds_that_differ"] = sum(a != b for a, b in zip(digests, calm, strict=True))
    result["descriptors_left"] = descriptors() - before
    result["children_left"] = len(children().split())
    print(json.dumps(result, indent=2))
    bad = ("torn_rows", "rounds_that_differ", "descriptors_left", "children_left")
    return int(any(result[name] for name in bad))


if __name__ == "__main__":
    sys.exit(main())
