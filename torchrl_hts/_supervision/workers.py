"""The workers of one collector: started, replaced, and never left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from torchrl_hts._actor.messages import ActorJob, Calibrated, UseSizes
from torchrl_hts._executor.gym_env import RowOptions
from torchrl_hts._executor.messages import ExecutorJob, ExecutorPlan
from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._processes.limits import check_descriptors, check_storage
from torchrl_hts._processes.server_pool import Servers
from torchrl_hts._processes.shutdown_once import Ending
from torchrl_hts._processes.worker_process import POLITE_S, WorkerProcess
from torchrl_hts._rounds.exchange import STOP
from torchrl_hts._rounds.schedule import Schedule
from torchrl_hts._rounds.shared_memory import Counter, Layout, SharedMemory
from torchrl_hts._supervision.channels import Channels
from torchrl_hts._supervision.failures import Site
from torchrl_hts._supervision.listener import Listener
from torchrl_hts.errors import WorkerId

__all__ = ["EnvironmentSource", "Shared", "Stage", "Workers"]

_LOG = logging.getLogger(__name__)  # what is done at the start, where it may take seconds
_KILLED_S = 5.0  # for the end of processes that were killed, where the cores are busy


class Stage(Enum):
    """How far the workers of a collector have come."""

    MAKING = "making"  # executors make environments, or none has been started yet
    SHARED = "shared"  # the memory is laid out and mapped; actors calibrate
    READY = "ready"  # actors have agreed on batch sizes: a `Supervisor` sets everybody to work
    CLOSED = "closed"  # a shutdown was asked for: workers end or have ended, nobody is started


@dataclass(frozen=True)
class EnvironmentSource:
    """What environments are made of.

    Attributes:
        factories: a pickled environment factory per environment.
        options: keyword arguments of `TorchRLEnvironment`.
        seed: which what is drawn while they are made depends on.
        first_env: the number of the first factory among those of all learners.
    """

    factories: Sequence[bytes]
    options: dict[str, Any]
    seed: int
    first_env: int = 0


@dataclass(frozen=True)
class Shared:
    """What there is from `Stage.SHARED` on.

    Attributes:
        memory: the shared memory.
        schedule: the schedule, over shared words.
        plan: what executors are told of it.
    """

    memory: SharedMemory
    schedule: Schedule
    plan: ExecutorPlan


class Workers:
    """Worker processes, in the places of which others may come.

    Args:
        source: what their environments are made of.
        num_executors: processes that the environments are spread over, in blocks of neighbours.
        num_actors: processes that run the policy.
        servers: that the processes come from; they are released with the last of them.
        timeouts_s: how long a worker may make no progress, by kind; see `ProgressWatch`.
        storage_dir: a directory for the slots; None for memory.

    After the constructor, which starts no process: `making.make_environments`, `share`,
    `start_actors`. Every method but `shutdown` raises `WorkerError` if a worker fails.

    Attributes:
        owner: for each environment, the index of its executor.
        executors, actors: the processes that there are, by index.
    """

    def __init__(
        self,
        source: EnvironmentSource,
        num_executors: int,
        num_actors: int,
        servers: Servers,
        *,
        timeouts_s: Mapping[str, float] | None = None,
        storage_dir: str | None = None,
    ) -> None:
        self.source = source
        self.num_executors, self.num_actors = num_executors, num_actors
        check_descriptors(num_executors, num_actors)
        num_envs = len(source.factories)
        self.owner = tuple(env * num_executors // num_envs for env in range(num_envs))
        self.executors: list[WorkerProcess] = []
        self.actors: list[WorkerProcess] = []
        self.servers = servers
        self._reached = Stage.MAKING
        self._shared: Shared | None = None
        self._actor_job: ActorJob | None = None
        self._closed_at: float | None = None  # by the monotonic clock
        self._ending = Ending()
        self._owner_pid = os.getpid()
        self._storage_dir = storage_dir
        self.channels = Channels(num_executors, storage_dir)
        self.listener = Listener(
            self.channels.learner.read_fd, timeouts_s or {}, self._site, source.first_env
        )

    @property
    def stage(self) -> Stage:
        """How far they have come."""
        return self._reached if self._closed_at is None else Stage.CLOSED

    def is_closed(self) -> bool:
        """Whether a shutdown was asked for, by whomever."""
        return self.stage is Stage.CLOSED

    def clock_s(self) -> float:
        """Seconds of the monotonic clock, which stands still here from the shutdown on."""
        return time.monotonic() if self._closed_at is None else self._closed_at

    @property
    def shared(self) -> Shared:
        """What there is from `Stage.SHARED` on."""
        if self._shared is None:
            raise RuntimeError("the memory has not been laid out: call share() first")
        return self._shared

    @property
    def processes(self) -> list[WorkerProcess]:
        """Executors, then actors."""
        return [*self.executors, *self.actors]

    def process(self, worker_id: WorkerId) -> WorkerProcess:
        """The one that has this place now."""
        (worker,) = (worker for worker in self.processes if worker.id == worker_id)
        return worker

    def row(self, worker: WorkerProcess) -> int:
        """Its row of counters."""
        return self.processes.index(worker)

    def environments(self, worker_id: WorkerId) -> tuple[int, ...]:
        """The environments of an executor; none of an actor."""
        if worker_id.kind != "executor":
            return ()
        return tuple(env for env, owner in enumerate(self.owner) if owner == worker_id.index)

    # Starting.

    def spawn_executor(self, index: int, *, observed: bool = False) -> WorkerProcess:
        """Start an executor, in the place of the one that was there, and let it make its envs.

        Args:
            index: which it is.
            observed: see `ExecutorJob`.
        """
        worker_id = WorkerId("executor", index)
        target = "torchrl_hts._executor.loop:run_executor"
        fds = self.channels.fds_of_executor(index)
        worker = self.servers.spawn_executor(worker_id, target, fds)
        self._enlist(self.executors, index, worker)
        envs = self.environments(worker_id)
        self.listener.made.difference_update(envs)
        job = ExecutorJob(
            factories=tuple(self.source.factories[env] for env in envs),
            env_indices=envs,
            first_env=self.source.first_env,
            observed=observed,
            torch_allowed=self.servers.with_torch,
            seed=self.source.seed,
            env_options=self.source.options,
        )
        self.listener.send(worker, job)
        return worker

    def share(
        self,
        layout: Layout,
        last_round: int | None,
        options: RowOptions,
        cores: int | None,
        a_core_each: bool,
    ) -> Shared:
        """Allocate the shared memory and let the executors map it.

        Args:
            layout, last_round, options, cores, a_core_each: see `ExecutorPlan`.
        """
        check_storage(layout.num_bytes, self._storage_dir, layout.timeline_bytes)
        memory = SharedMemory(self.channels.memory_fd, layout)
        plan = ExecutorPlan(layout, last_round, 0, options, cores, a_core_each)
        self._shared = Shared(memory, memory.schedule(last_round), plan)
        self.listener.first_env = layout.first_env
        self._reached = Stage.SHARED
        for executor in self.executors:
            self._tell_plan(executor)
        return self._shared

    def start_actors(self, job: ActorJob) -> InvariantSizes:
        """Start the actors and let them calibrate; returns the batch sizes that all agree on.

        Args:
            job: of every actor; which row of counters is its own is filled in here.
        """
        self._actor_job = job
        _LOG.info("calibrating the batch sizes of inference (actors: %d)", self.num_actors)
        for index in range(self.num_actors):
            self._spawn_actor(index)
        for actor in self.actors:
            self.listener.send(actor, replace(job, worker=self.row(actor)))
        first, *others = self._calibrated(self.actors)
        sizes = first.sizes
        for other in others:
            sizes = sizes.intersect(other.sizes)
        for actor in self.actors:
            self.listener.send(actor, UseSizes(sizes))
        self._actor_job = replace(job, sizes=sizes)
        self._reached = Stage.READY
        return sizes

    def replace(self, worker_id: WorkerId) -> None:
        """Start another in the place of a worker that has failed, to where the others rest."""
        lost = self.process(worker_id)
        self.listener.dismiss(lost)  # one that was interrupted while it was made
        if worker_id.kind == "executor":
            executor = self.spawn_executor(self.executors.index(lost))
            self.receive_all([executor])
            self._tell_plan(executor)
        else:
            job = self._actor_job
            if job is None or job.sizes is None:
                raise RuntimeError("actors are replaced when all are calibrated, not before")
            actor = self._spawn_actor(self.actors.index(lost))
            self.listener.send(actor, replace(job, worker=self.row(actor)))
            self._calibrated([actor])
            self.listener.send(actor, UseSizes(job.sizes))

    def receive_all(self, workers: Sequence[WorkerProcess]) -> list[Any]:
        """A message from each of some workers, in their order."""
        return self.listener.receive_all(workers, self.progress)

    def _spawn_actor(self, index: int) -> WorkerProcess:
        target = "torchrl_hts._actor.loop:run_actor"
        fds = self.channels.fds_of_actor()
        worker = self.servers.spawn_actor(WorkerId("actor", index), target, fds)
        self._enlist(self.actors, index, worker)
        return worker

    def _enlist(self, places: list[WorkerProcess], index: int, worker: WorkerProcess) -> None:
        """Give a new worker its place, unless everybody has been shut down meanwhile."""
        if not self.is_closed():
            places[index : index + 1] = [worker]
            self.listener.add(worker)
        if self.is_closed():  # by a shutdown that saw it in its place, or that did not
            worker.hang_up()
            worker.kill()
            worker.close()
            raise RuntimeError("the collector was shut down while a worker was started")

    def _tell_plan(self, executor: WorkerProcess) -> None:
        self.listener.send(executor, replace(self.shared.plan, worker=self.row(executor)))

    def _calibrated(self, actors: Sequence[WorkerProcess]) -> list[Calibrated]:
        # No time-out: what calibrates makes no progress that could be seen, and may take long.
        return self.listener.receive_all(actors, time.monotonic)

    # Ending.

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End every worker: politely, and by force after the time-out; see `Ending`."""
        timeout_s = POLITE_S if timeout_s is None else timeout_s
        if self._closed_at is None:
            self._closed_at = time.monotonic()
            self.listener.close()
        if os.getpid() == self._owner_pid:  # not in a fork of the user's process
            self._ending(partial(self._end, timeout_s))

    def _end(self, timeout_s: float) -> None:
        try:
            self._end_politely(timeout_s)
        finally:  # a second Ctrl-C ends the wait, and leaves nothing behind either
            self._end_by_force(timeout_s)

    def _end_politely(self, timeout_s: float) -> None:
        for inbox in self.channels.executors:
            with contextlib.suppress(OSError):  # each on its own: one executor may be gone
                inbox.post([STOP])
        with contextlib.suppress(OSError):
            self.channels.actors.post([STOP] * self.num_actors)
        for worker in self.processes:
            worker.hang_up()
        deadline = time.monotonic() + timeout_s
        late = [
            worker.name
            for worker in self.processes
            if worker.exit_status(max(0.0, deadline - time.monotonic())) is None
        ]
        if late and timeout_s and self._reached is Stage.READY:  # before, imports take their time
            warnings.warn(
                f"{', '.join(late)} had not ended {timeout_s:g} s after the shutdown, and will "
                "be killed: if it is the environments' close() that takes so long, give "
                "shutdown(timeout=...) more",
                RuntimeWarning,
                stacklevel=6,  # whoever has called the collector
            )

    def _end_by_force(self, timeout_s: float) -> None:
        for worker in self.processes:
            worker.hang_up()
            worker.kill()
        deadline = time.monotonic() + max(_KILLED_S, timeout_s)
        for worker in self.processes:
            worker.exit_status(max(0.0, deadline - time.monotonic()))
            worker.close()
        self.servers.release()
        self.channels.close()

    # How far, and where.

    def progress(self) -> Hashable:
        """What changes as long as anybody gets on."""
        if self._shared is None:
            return len(self.listener.made)
        memory = self._shared.memory
        return memory.steps.tobytes(), memory.counters[:, Counter.AT].tobytes()

    def _site(self, worker: WorkerProcess) -> Site:
        if worker.id.kind == "executor":
            envs = self.environments(worker.id)
            if self._shared is None:
                return Site.of_making(envs, self.listener.made, self.source.first_env)
            memory, schedule = self._shared.memory, self._shared.schedule
            envs = memory.layout.envs(envs)
            return Site.of_executor(envs, schedule, memory, self.row(worker))
        memory, schedule = self.shared.memory, self.shared.schedule
        ready = self._reached is Stage.READY
        return Site.of_actor(schedule, memory, self.row(worker), started=ready)
