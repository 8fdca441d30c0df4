"""The workers of one collector: started, replaced, and never left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchrl_hts._actor.messages import ActorJob, Calibrated, UseSizes
from torchrl_hts._executor.gym_env import GymDescription, RowOptions
from torchrl_hts._executor.messages import (
    Described,
    ExecutorJob,
    ExecutorPlan,
    NeedsTorch,
    Observe,
    Observed,
)
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._executor.trial_observations import Observations
from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._processes.fork_server import POLITE_S, WorkerProcess
from torchrl_hts._processes.limits import check_descriptors, check_storage
from torchrl_hts._processes.server_pool import Servers
from torchrl_hts._processes.shutdown_once import Ending
from torchrl_hts._rounds.exchange import STOP, Inbox, LearnerPort
from torchrl_hts._rounds.schedule import Schedule
from torchrl_hts._rounds.shared_memory import Counter, Key, Layout, SharedMemory
from torchrl_hts._supervision.failures import Site
from torchrl_hts._supervision.listener import Listener
from torchrl_hts.errors import Failure, WorkerError, WorkerId

__all__ = ["Workers"]

_LOG = logging.getLogger(__name__)  # what is done at the start, where it may take seconds

Description = GymDescription | TorchRLDescription

_TOLD = (Failure.RAISED, Failure.INVALID, Failure.OUT_OF_MEMORY)  # by an exception


class Workers:
    """Worker processes, their inboxes, and the memory that they share.

    Args:
        num_envs: number of environments.
        num_executors: processes that they are spread over, in blocks of neighbours.
        num_actors: processes that run the policy.
        servers: that the processes come from; they are released with the last of them.
        timeouts_s: how long a worker may make no progress, by kind; see `ProgressWatch`.
        storage_dir: a directory for the slots; None for memory.

    After the constructor, which starts no process: `start_executors`, `share`, `start_actors`.
    Every method but `shutdown` raises `WorkerError` if a worker fails.
    """

    def __init__(
        self,
        num_envs: int,
        num_executors: int,
        num_actors: int,
        servers: Servers,
        *,
        timeouts_s: Mapping[str, float] | None = None,
        storage_dir: str | None = None,
    ) -> None:
        self.num_envs = num_envs
        self.num_executors, self.num_actors = num_executors, num_actors
        check_descriptors(num_executors, num_actors)
        self.owner = tuple(env * num_executors // num_envs for env in range(num_envs))
        self.executors: list[WorkerProcess] = []
        self.actors: list[WorkerProcess] = []
        self._shared = False
        self._started = False
        self._servers = servers
        self._ending = Ending()
        self.closed_at: float | None = None  # by the monotonic clock
        self._owner_pid = os.getpid()
        self._storage_dir = storage_dir
        self.executor_inboxes: list[Inbox] = []
        with contextlib.ExitStack() as opened:
            self.memory_fd = SharedMemory.create_fd(storage_dir)
            opened.callback(os.close, self.memory_fd)
            self.actor_inbox = Inbox.create()
            opened.callback(self.actor_inbox.close)
            self.learner_inbox = Inbox.create()
            opened.callback(self.learner_inbox.close)
            for _ in range(num_executors):
                self.executor_inboxes.append(Inbox.create())
                opened.callback(self.executor_inboxes[-1].close)
            opened.pop_all()
        self._listener = Listener(self.learner_inbox.read_fd, timeouts_s or {}, self._site)

    def is_closed(self) -> bool:
        """Whether the workers have been shut down."""
        return self.closed_at is not None

    @property
    def workers(self) -> list[WorkerProcess]:
        """Executors, then actors."""
        return [*self.executors, *self.actors]

    def environments(self, executor: int) -> tuple[int, ...]:
        """The environments of an executor."""
        return tuple(env for env, owner in enumerate(self.owner) if owner == executor)

    # Starting.

    def start_executors(
        self,
        factories: Sequence[bytes],
        env_options: dict[str, Any],
        seed: int,
        known: Observations | None = None,
        first_env: int = 0,
    ) -> list[Description]:
        """Make all environments; returns what each says of itself.

        The first says what it has observed. Where that isn't known yet, the first executor goes
        ahead, and tells that, whether the environments need torch, and which modules the others
        should share.

        Args:
            factories: a pickled environment factory per environment.
            env_options: keyword arguments of `TorchRLEnvironment`.
            seed: which what is drawn while they are made depends on.
            known: what environment 0 has observed where it was tried out.
            first_env: the number of environment 0 among the environments of all learners.
        """
        self._servers.begin(factories)
        self._seed, self._first_env = seed, first_env
        self._factories, self._env_options = factories, env_options
        _LOG.info("making %d environments (executors: %d)", self.num_envs, self.num_executors)
        descriptions: list[Description] = []
        if known is None:
            first = self._start_first()
            if isinstance(first, NeedsTorch):
                self._listener.dismiss(self.executors[0])
                self._servers.with_torch = True
                first = self._start_first()
            assert isinstance(first, Described)
            descriptions += first.descriptions
            if self.num_executors > 1:  # or its server would import them for nobody
                self._servers.preload(first.modules)
        rest = range(1 if descriptions else 0, self.num_executors)
        others = [self._spawn_executor(index) for index in rest]
        for said in self._receive_all(others):
            if isinstance(said, NeedsTorch):
                raise ValueError(
                    f"environment {said.env} is a TorchRL environment and environment 0 a "
                    "gymnasium one; all environments of a collector must be of one kind"
                )
            descriptions += said.descriptions
        if known is not None:
            descriptions[0] = replace(descriptions[0], observations=known)
        return descriptions

    def observe(self, description: Description) -> Description:
        """Environment 0's description with observations, after which it has been made anew.

        Where it can't be observed either, there are none. To be called before `share`.
        """
        first = self.executors[0]
        self._listener.send(first, Observe())
        said: Observed = self._receive_all([first])[0]
        return replace(description, observations=said.observations)

    def _start_first(self) -> Described | NeedsTorch:
        """Start executor 0; returns what it says of its environments.

        It observes its first environment, if that can be put back. What ends the process at that,
        or takes too long, is for the first round to meet, and to tell where.
        """
        self._listener.observing.clear()
        first = self._spawn_executor(0, observed=True)
        try:
            said: Described | NeedsTorch = self._receive_all([first])[0]
        except WorkerError as error:
            if self.is_closed() or not self._listener.observing or error.failure in _TOLD:
                raise
            self._listener.dismiss(first)
            said = self._receive_all([self._spawn_executor(0)])[0]
        return said

    def _spawn_executor(self, index: int, *, observed: bool = False) -> WorkerProcess:
        """Start an executor, in the place of the one that was there, and let it make its envs."""
        fds = [
            self.memory_fd,
            self.executor_inboxes[index].read_fd,
            self.actor_inbox.write_fd,
            self.learner_inbox.write_fd,
        ]
        target = "torchrl_hts._executor.loop:run_executor"
        worker = self._servers.spawn_executor(WorkerId("executor", index), target, fds)
        self._enlist(self.executors, index, worker)
        envs = self.environments(index)
        self._listener.made.difference_update(envs)
        job = ExecutorJob(
            factories=tuple(self._factories[env] for env in envs),
            env_indices=envs,
            first_env=self._first_env,
            observed=observed,
            torch_allowed=self._servers.with_torch,
            seed=self._seed,
            env_options=self._env_options,
        )
        self._listener.send(worker, job)
        return worker

    def share(
        self,
        layout: Layout,
        last_round: int | None,
        options: RowOptions,
        cores: int | None,
        a_core_each: bool,
        truncated_keys: tuple[Key, ...] = (),
    ) -> tuple[SharedMemory, Schedule]:
        """Allocate the shared memory and let the executors map it.

        Args:
            layout, last_round, options, cores, a_core_each: see `ExecutorPlan`.
            truncated_keys: of the flags that tell of an episode that was cut off.
        """
        self._truncated_keys = truncated_keys
        check_storage(layout.num_bytes, self._storage_dir)
        self.memory = SharedMemory(self.memory_fd, layout)
        self.schedule = self.memory.schedule(last_round)
        self._shared = True
        self.port = LearnerPort(
            self.schedule, self.learner_inbox, self.executor_inboxes, self.owner
        )
        self._plan = ExecutorPlan(layout, last_round, 0, options, cores, a_core_each)
        for index, executor in enumerate(self.executors):
            self._listener.send(executor, replace(self._plan, worker=index))
        return self.memory, self.schedule

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
            self._listener.send(actor, replace(job, worker=self._row(actor)))
        first, *others = self._calibrated(self.actors)
        sizes: InvariantSizes = first.sizes
        for other in others:
            sizes = sizes.intersect(other.sizes)
        for actor in self.actors:
            self._listener.send(actor, UseSizes(sizes))
        self._actor_job = replace(job, sizes=sizes)
        self._started = True
        return sizes

    def _spawn_actor(self, index: int) -> WorkerProcess:
        fds = [
            self.memory_fd,
            self.actor_inbox.read_fd,
            self.actor_inbox.write_fd,
            *(inbox.write_fd for inbox in self.executor_inboxes),
        ]
        target = "torchrl_hts._actor.loop:run_actor"
        worker = self._servers.spawn_actor(WorkerId("actor", index), target, fds)
        self._enlist(self.actors, index, worker)
        return worker

    def _enlist(self, team: list[WorkerProcess], index: int, worker: WorkerProcess) -> None:
        """Give a new worker its place, unless everybody has been shut down meanwhile."""
        if not self.is_closed():
            team[index : index + 1] = [worker]
            self._listener.add(worker)
        if self.is_closed():  # by a shutdown that saw it in its place, or that did not
            worker.hang_up()
            worker.kill()
            worker.close()
            raise RuntimeError("the collector was shut down while a worker was started")

    def _replace(self, worker_id: WorkerId) -> None:
        (worker,) = (w for w in self.workers if w.id == worker_id)
        self._listener.dismiss(worker)  # one that was interrupted while it was made
        if worker_id.kind == "executor":
            worker = self._spawn_executor(self.executors.index(worker))
            self._receive_all([worker])
            self._listener.send(worker, replace(self._plan, worker=self._row(worker)))
        else:
            worker = self._spawn_actor(self.actors.index(worker))
            self._listener.send(worker, replace(self._actor_job, worker=self._row(worker)))
            self._calibrated([worker])
            assert self._actor_job.sizes is not None
            self._listener.send(worker, UseSizes(self._actor_job.sizes))

    # Ending.

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End every worker: politely, and by force after the time-out; see `Ending`."""
        timeout_s = POLITE_S if timeout_s is None else timeout_s
        if self.closed_at is None:
            self.closed_at = time.monotonic()
            self._listener.close()
        if os.getpid() == self._owner_pid:  # not in a fork of the user's process
            self._ending(partial(self._end, timeout_s))

    def _end(self, timeout_s: float) -> None:
        try:
            self._end_politely(timeout_s)
        finally:  # a second Ctrl-C ends the wait, and leaves nothing behind either
            self._end_by_force(timeout_s)

    def _end_politely(self, timeout_s: float) -> None:
        for inbox in self.executor_inboxes:
            with contextlib.suppress(OSError):  # each on its own: one executor may be gone
                inbox.post([STOP])
        with contextlib.suppress(OSError):
            self.actor_inbox.post([STOP] * self.num_actors)
        for worker in self.workers:
            worker.hang_up()
        deadline = time.monotonic() + timeout_s
        late = [
            worker.name
            for worker in self.workers
            if worker.exit_status(max(0.0, deadline - time.monotonic())) is None
        ]
        if late and timeout_s and self._started:  # before, imports take their time
            warnings.warn(
                f"{', '.join(late)} had not ended {timeout_s:g} s after the shutdown, and will "
                "be killed: if it is the environments' close() that takes so long, give "
                "shutdown(timeout=...) more",
                RuntimeWarning,
                stacklevel=6,  # whoever has called the collector
            )

    def _end_by_force(self, timeout_s: float) -> None:
        for worker in self.workers:
            worker.hang_up()
            worker.kill()
        deadline = time.monotonic() + max(1.0, timeout_s)
        for worker in self.workers:
            worker.exit_status(max(0.0, deadline - time.monotonic()))
            worker.close()
        self._servers.release()
        for inbox in (*self.executor_inboxes, self.actor_inbox, self.learner_inbox):
            inbox.close()
        memory_fd, self.memory_fd = self.memory_fd, -1
        if memory_fd >= 0:
            os.close(memory_fd)

    # Who and where.

    def _receive_all(self, workers: Sequence[WorkerProcess]) -> list[Any]:
        return self._listener.receive_all(workers, self._progress)

    def _calibrated(self, actors: Sequence[WorkerProcess]) -> list[Calibrated]:
        # No time-out: what calibrates makes no progress that could be seen, and may take long.
        return self._listener.receive_all(actors, time.monotonic)

    def _progress(self) -> Hashable:
        """What changes as long as anybody gets on."""
        if not self._shared:
            return len(self._listener.made)
        return self.memory.steps.tobytes(), self.memory.counters[:, Counter.AT].tobytes()

    def _row(self, worker: WorkerProcess) -> int:
        """Its row of counters."""
        return self.workers.index(worker)

    def _environments_of(self, worker: WorkerProcess) -> tuple[int, ...]:
        if worker in self.executors:
            return self.environments(self.executors.index(worker))
        return ()

    def _site(self, worker: WorkerProcess) -> Site:
        if worker in self.executors:
            return Site.of_executor(
                self._environments_of(worker),
                self.schedule if self._shared else None,
                self.memory if self._shared else None,
                self._row(worker),
                self._listener.made,
            )
        started = self._actor_job.sizes is not None
        return Site.of_actor(self.schedule, self.memory, self._row(worker), started=started)
