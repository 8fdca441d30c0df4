"""Who competes: HTSCollector, TorchRL's own collectors, plain loops, and two other libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from _loops import (
    make_ale_loop,
    make_envpool_loop,
    make_gymnasium_loop,
    make_puffer_loop,
    make_vector_loop,
)
from _workloads import (
    CORES,
    TRAININGS,
    Training,
    Workload,
    find_workload,
    make_agent,
    make_learn,
    make_policy,
    policy_of,
)
from support.pixels import Agent
from tensordict import TensorDictBase
from torchrl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from torchrl.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv

from torchrl_hts import HTSCollector
from torchrl_hts._reports.statistics import WorkerStatistics

__all__ = [
    "CPU_ONLY",
    "DEFAULT_CONTENDERS",
    "NAMES",
    "PACKAGES",
    "SAMPLE_FACTORY",
    "Runner",
    "add_barrier",
    "lacking",
    "make_runner",
    "per_step_s",
    "serial",
    "wrap",
]

SAMPLE_FACTORY = "sample-factory"  # which can't be made a `Runner`: it calls, and isn't called
# What contenders need beyond the requirements of the others, and where it comes from.
MAKE_CONTENDERS = "`make contenders`, and then .venv-contenders/bin/python"
PACKAGES = {
    "sb3": ("stable_baselines3", MAKE_CONTENDERS),
    "loop-envpool": ("envpool", MAKE_CONTENDERS),
    "loop-puffer": ("pufferlib", MAKE_CONTENDERS),
    "loop-puffer-serial": ("pufferlib", MAKE_CONTENDERS),
    SAMPLE_FACTORY: ("sample_factory", MAKE_CONTENDERS),
}
CPU_ONLY = {"async-batched", SAMPLE_FACTORY}  # which aren't told of a device
STOCK = "-stock"  # suffix of a contender whose A2C update is TorchRL's own


class Runner(Protocol):
    """A contender at work."""

    def advance(self) -> int:
        """Gathers a batch and learns from it; returns its number of steps."""

    def begin(self) -> None:
        """Says that the batches before were to warm up, and don't count."""

    def facts(self) -> dict[str, Any]:
        """What else is worth noting: the learner's threads, the shape of a batch, and more."""

    def close(self) -> None:
        """Ends its processes."""


@dataclass(frozen=True)
class Contender:
    """A way to gather batches.

    Attributes:
        make: makes a collector (anything that yields batches ``[N, T]`` without end) of an agent.
        lag: of the delayed update; None for an update without.
        concurrent: whether it gathers while the learner learns. One that doesn't leaves the
            machine to the learner, which then has a thread for each core.
    """

    make: Callable[[Workload, Training, int, Agent], Any]
    lag: int | None = None
    concurrent: bool = False


class CollectorRunner:
    """Learns from what a collector yields."""

    def __init__(
        self,
        contender: Contender,
        workload: Workload,
        training: Training,
        num_envs: int,
        stock: bool,
        learner_threads: int | None = None,
    ) -> None:
        torch.set_num_threads(1)
        agent = make_agent(workload, training.device)
        self._learn = make_learn(agent, training, num_envs, contender.lag, stock=stock)
        self._collector = contender.make(workload, training, num_envs, agent)
        # TorchRL's multi-process collectors set this to 1 and leave it there.
        shares_cores = contender.concurrent and not training.mostly_learns
        torch.set_num_threads(learner_threads or (1 if shares_cores else CORES))
        self._batches: Iterator[TensorDictBase] = iter(self._collector)
        self._shape: list[int] = []
        self._learner_cpu_s, self._frames = 0.0, 0
        self._before: Mapping[str, WorkerStatistics] = {}

    def advance(self) -> int:
        batch = next(self._batches)
        used = time.process_time()
        if self._learn is not None:
            self._learn(batch)
            self._collector.update_policy_weights_()
        self._learner_cpu_s += time.process_time() - used
        self._frames += batch.numel()
        self._shape = [*batch.shape]
        return batch.numel()

    def begin(self) -> None:
        self._learner_cpu_s, self._frames = 0.0, 0
        if isinstance(self._collector, HTSCollector):
            self._before = self._collector.statistics().workers

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"threads": torch.get_num_threads(), "batch": self._shape}
        if not isinstance(self._collector, HTSCollector):
            return found
        counted = self._collector.statistics()
        used_s = per_step_s(self._before, counted.workers)
        return {
            **found,
            "learner_waiting_share": counted.learner_waiting_share,
            "mean_actor_batch_size": counted.mean_actor_batch_size,
            "executors_cpu_s": used_s["executor"],
            "actors_cpu_s": used_s["actor"],
            "learner_cpu_s": self._learner_cpu_s / self._frames,
        }

    def close(self) -> None:
        self._collector.shutdown()


def per_step_s(
    before: Mapping[str, WorkerStatistics], now: Mapping[str, WorkerStatistics]
) -> dict[str, float]:
    """Processor time of executors and actors for each step that was made between two moments."""
    cpu_s, steps = {"executor": 0.0, "actor": 0.0}, 0
    for name, worker in now.items():
        kind, old = name.partition(" ")[0], before.get(name)
        cpu_s[kind] += worker.cpu_s - (old.cpu_s if old else 0.0)
        if kind == "executor":
            steps += worker.events - (old.events if old else 0)
    return {kind: used_s / steps for kind, used_s in cpu_s.items()}


def make_runner(
    name: str,
    workload: str,
    training: str,
    num_envs: int,
    learner_threads: int | None = None,
    device: str = "cpu",
    policy_device: str = "cpu",
) -> Runner:
    """A contender at work on a cell of the benchmark.

    Args:
        name: of `NAMES`.
        workload: what is stepped.
        training: what is learned from it.
        num_envs: environments.
        learner_threads: of torch in the learner; by default one for each core, or one where
            gathering goes on meanwhile and learning isn't most of the work.
        device, policy_device: see `Training`.

    Raises:
        ValueError: if it can't do that work.
    """
    plain = name.removesuffix(STOCK)
    work = find_workload(workload)
    trained = replace(TRAININGS[training], device=device, policy_device=policy_device)
    if plain == "sb3":
        from _stable_baselines import StableBaselines  # an optional package

        return StableBaselines(work, trained, num_envs, learner_threads or CORES)
    stock = name != plain
    return CollectorRunner(CONTENDERS[plain], work, trained, num_envs, stock, learner_threads)


# Those of TorchRL and ours.


def wrap(factory: Callable[[], Any]) -> EnvBase:
    """The same environment for TorchRL's collectors."""
    return GymWrapper(factory(), categorical_action_encoding=True)


def serial(factories: list[Callable[[], Any]]) -> EnvBase:
    """Several of them in one process."""
    return SerialEnv(len(factories), [partial(wrap, factory) for factory in factories])


def shares(workload: Workload, num_envs: int) -> list[Callable[[], EnvBase]]:
    """A maker of environments for each worker: one each where they wait, else one per core."""
    factories = workload.factories(num_envs)
    workers = num_envs if workload.waits else min(CORES, num_envs)
    return [partial(serial, factories[worker::workers]) for worker in range(workers)]


def _sizes(training: Training, num_envs: int) -> dict[str, int]:
    return {"frames_per_batch": num_envs * training.sync_interval, "total_frames": -1}


def _devices(training: Training) -> dict[str, str]:
    """Of TorchRL's collectors, which run the learner's own policy where its parameters are."""
    if training.device == "cpu":
        return {}
    devices = {"policy_device": training.device, "storing_device": training.device}
    return {**devices, "env_device": "cpu"}


def _hts(
    workload: Workload,
    training: Training,
    num_envs: int,
    agent: Agent,
    lag: int,
    timeline_events: int = 0,
    num_actors: int | None = None,
) -> Any:
    return HTSCollector(
        workload.units(num_envs),
        policy_of(agent, training),
        **_sizes(training, num_envs),
        lag=lag,
        seed=0,
        storing_device=training.device,
        policy_device=training.policy_device,
        return_same_td=True,
        timeline_events=timeline_events,
        num_actors=num_actors,
    )


def add_barrier(collector: HTSCollector) -> HTSCollector:
    """Makes everybody wait at the end of each round for the slowest, as in the paper.

    A round then opens when the one before is full and its own parameters are there. Only here, to
    be compared with: the results are the same bits.
    """
    learner, supervisor = collector._learner, collector._supervisor

    def wait() -> None:
        if learner.lent:  # the next round opens when this returns
            supervisor.wait_for_round(learner.round)

    collector.pre_collect_hook = wait
    return collector


def _hts_barrier(workload: Workload, training: Training, num_envs: int, agent: Agent) -> Any:
    return add_barrier(_hts(workload, training, num_envs, agent, lag=1))


def _serial(workload: Workload, training: Training, num_envs: int, agent: Agent) -> Any:
    return _in_turns(serial(workload.factories(num_envs)), training, num_envs, agent)


def _parallel(workload: Workload, training: Training, num_envs: int, agent: Agent) -> Any:
    factories = [partial(wrap, factory) for factory in workload.factories(num_envs)]
    return _in_turns(ParallelEnv(num_envs, factories), training, num_envs, agent)


def _in_turns(env: EnvBase, training: Training, num_envs: int, agent: Agent) -> Any:
    arguments = {**_sizes(training, num_envs), **_devices(training)}
    return Collector(env, policy_of(agent, training), **arguments, return_same_td=True)


def _multi_sync(workload: Workload, training: Training, num_envs: int, agent: Agent) -> Any:
    return MultiSyncCollector(
        shares(workload, num_envs),
        policy_of(agent, training),
        **_sizes(training, num_envs),
        **_devices(training),
        cat_results=0,
    )


def _multi_async(workload: Workload, training: Training, num_envs: int, agent: Agent) -> Any:
    return MultiAsyncCollector(
        shares(workload, num_envs),
        policy_of(agent, training),
        **_sizes(training, num_envs),
        **_devices(training),
    )


def _async_batched(workload: Workload, training: Training, num_envs: int, agent: Agent) -> Any:
    if training.algorithm is not None:
        raise ValueError("its batches are flat and interleaved: GAE can't use them")
    return AsyncBatchedCollector(
        [partial(wrap, factory) for factory in workload.factories(num_envs)],
        policy_factory=partial(make_policy, workload, training),
        env_backend="multiprocessing",
        transport="auto",
        **_sizes(training, num_envs),
    )


CONTENDERS = {
    "hts": Contender(partial(_hts, lag=1), lag=1, concurrent=True),
    "hts-lag0": Contender(partial(_hts, lag=0), lag=0),
    "hts-lag2": Contender(partial(_hts, lag=2), lag=2, concurrent=True),
    "hts-timeline": Contender(
        partial(_hts, lag=1, timeline_events=100_000), lag=1, concurrent=True
    ),
    "hts-two-actors": Contender(partial(_hts, lag=1, num_actors=2), lag=1, concurrent=True),
    "hts-barrier": Contender(_hts_barrier, lag=1, concurrent=True),
    "serial": Contender(_serial),
    "parallel": Contender(_parallel),
    "multi-sync": Contender(_multi_sync),
    "multi-async": Contender(_multi_async, concurrent=True),
    "async-batched": Contender(_async_batched, concurrent=True),
    "loop-gymnasium": Contender(make_gymnasium_loop),
    "loop-ale": Contender(make_ale_loop),
    "loop-envpool": Contender(make_envpool_loop),
    "loop-puffer": Contender(make_puffer_loop),
    "loop-puffer-serial": Contender(partial(make_puffer_loop, serial=True)),
    "loop-vector": Contender(make_vector_loop),
}
DEFAULT_CONTENDERS = ["hts", "serial", "parallel", "multi-sync", "multi-async", "async-batched"]
NAMES = [*CONTENDERS, "sb3", SAMPLE_FACTORY]
NAMES += [name + STOCK for name in CONTENDERS if name != "async-batched"]


def lacking() -> set[str]:
    """The contenders whose package isn't installed."""
    return {name for name, (package, _) in PACKAGES.items() if find_spec(package) is None}
