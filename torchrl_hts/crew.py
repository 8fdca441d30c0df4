"""The executors and actors of one collector: started, waited for, and never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchrl_hts.actor import ActorJob
from torchrl_hts.errors import HTSError, PolicyError, WorkerError
from torchrl_hts.exchange import SAVE, STOP, Inbox, LearnerPort
from torchrl_hts.executor import ExecutorJob, ExecutorPlan
from torchrl_hts.gym_env import GymDescription, RowOptions
from torchrl_hts.invariance import InvariantSizes
from torchrl_hts.messages import receive_object, send_object
from torchrl_hts.schedule import Schedule
from torchrl_hts.storage import Layout, SharedMemory
from torchrl_hts.torchrl_env import TorchRLDescription
from torchrl_hts.workers import (
    TORCH_FREE,
    WITH_TORCH,
    WorkerProcess,
    WorkerServer,
    acquire_server,
    release_server,
)

__all__ = ["Crew"]

Description = GymDescription | TorchRLDescription

# A pickled factory that speaks of TorchRL, though not of our own environments, most likely makes
# one of its environments. A wrong guess costs time alone.
_TORCHRL = re.compile(rb"torchrl(?!_hts)")


class Crew:
    """Worker processes, their inboxes, and the memory that they share.

    Args:
        num_envs: number of environments.
        num_executors: processes that they are spread over, in blocks of neighbours.
        num_actors: processes that run the policy.

    After the constructor: `start_executors`, `share`, `start_actors`, then `run` and, any number
    of times, `stop` and `run`. Every method but `shutdown` raises `WorkerError` if a worker fails.
    """

    def __init__(self, num_envs: int, num_executors: int, num_actors: int) -> None:
        self.owner = tuple(env * num_executors // num_envs for env in range(num_envs))
        self.num_actors = num_actors
        self.executors: list[WorkerProcess] = []
        self.actors: list[WorkerProcess] = []
        self._servers: list[WorkerServer] = []
        self._lock = threading.Lock()
        self.closed_at: float | None = None  # by the monotonic clock
        self._owner_pid = os.getpid()
        self._control_poll = select.poll()  # every worker's connection
        self._poll = select.poll()  # the same and the learner's inbox
        self._by_fd: dict[int, WorkerProcess] = {}
        self.memory_fd = SharedMemory.create_fd()
        self.executor_inboxes = [Inbox.create() for _ in range(num_executors)]
        self.actor_inbox = Inbox.create()
        self.learner_inbox = Inbox.create()
        self._poll.register(self.learner_inbox.read_fd, select.POLLIN)
        # Importing torch in a server takes seconds: it begins now, while environments are made.
        try:
            self._torch_server = self._acquire(WITH_TORCH)
        except BaseException:
            self.shutdown(0.0)
            raise

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
        self, factories: Sequence[bytes], env_options: dict[str, Any]
    ) -> list[Description]:
        """Make all environments; returns what each says of itself.

        The first executor goes ahead: it tells whether the environments need torch, and which
        modules the others should share.

        Args:
            factories: a pickled environment factory per environment.
            env_options: keyword arguments of `TorchRLEnvironment`.
        """
        with_torch = any(_TORCHRL.search(factory) for factory in set(factories))
        server = self._torch_server if with_torch else self._acquire(TORCH_FREE)
        first = self._spawn_executor(0, server, factories, env_options)
        kind, described, modules = self._receive(first)
        if kind == "torchrl":
            self._forget(first)
            server = self._torch_server
            first = self._spawn_executor(0, server, factories, env_options)
            _, described, modules = self._receive(first)
        server.preload([name for name in modules if name != "__main__"])
        others = [
            self._spawn_executor(index, server, factories, env_options)
            for index in range(1, len(self.executor_inboxes))
        ]
        descriptions: list[Description] = described
        for kind, described, _ in self._receive_all(others):
            if kind == "torchrl":
                raise ValueError(
                    f"environment {described} is a TorchRL environment and environment 0 a "
                    "gymnasium one; all environments of a collector must be of one kind"
                )
            descriptions += described
        for inbox in self.executor_inboxes:
            os.close(inbox.read_fd)
            inbox.read_fd = -1
        os.close(self.learner_inbox.write_fd)
        self.learner_inbox.write_fd = -1
        return descriptions

    def _spawn_executor(
        self,
        index: int,
        server: WorkerServer,
        factories: Sequence[bytes],
        env_options: dict[str, Any],
    ) -> WorkerProcess:
        fds = [
            self.memory_fd,
            self.executor_inboxes[index].read_fd,
            self.actor_inbox.write_fd,
            self.learner_inbox.write_fd,
        ]
        worker = server.spawn(f"executor {index}", "torchrl_hts.executor:run_executor", fds)
        self.executors.append(worker)
        envs = self.environments(index)
        job = ExecutorJob(
            factories=tuple(factories[env] for env in envs),
            env_indices=envs,
            torch_allowed=server is self._torch_server,
            env_options=env_options,
        )
        self._watch(worker)
        self._send(worker, job)
        return worker

    def share(
        self, layout: Layout, last_round: int | None, options: RowOptions
    ) -> tuple[SharedMemory, Schedule]:
        """Allocate the shared memory and let the executors map it."""
        self.memory = SharedMemory(self.memory_fd, layout)
        self.schedule = self.memory.schedule(last_round)
        self.port = LearnerPort(
            self.schedule, self.learner_inbox, self.executor_inboxes, self.owner
        )
        for index, executor in enumerate(self.executors):
            self._send(executor, ExecutorPlan(layout, last_round, index, options))
        return self.memory, self.schedule

    def start_actors(self, job: Callable[[int], ActorJob]) -> InvariantSizes:
        """Start the actors and let them calibrate; returns the batch sizes that all agree on.

        Args:
            job: makes the job of the worker with a given row of counters.
        """
        fds = [
            self.memory_fd,
            self.actor_inbox.read_fd,
            self.actor_inbox.write_fd,
            *(inbox.write_fd for inbox in self.executor_inboxes),
        ]
        for index in range(self.num_actors):
            actor = self._torch_server.spawn(f"actor {index}", "torchrl_hts.actor:run_actor", fds)
            self.actors.append(actor)
            self._watch(actor)
        for index, actor in enumerate(self.actors):
            self._send(actor, job(len(self.executors) + index))
        found: list[InvariantSizes] = [m[1] for m in self._receive_all(self.actors)]
        sizes = found[0]
        for other in found[1:]:
            sizes = sizes.intersect(other)
        for actor in self.actors:
            self._send(actor, sizes)
        return sizes

    # Running.

    def run(
        self,
        starts: Sequence[int | bytes],
        noise_seed: int,
        first_round: int,
        *,
        lent: bool,
        ahead: int,
    ) -> None:
        """Reset every environment, or put it into a saved state, and set everybody to work.

        Args:
            starts: a seed or a state (see `save`) per environment.
            noise_seed: seed of the action noise.
            first_round: the round that is to be lent next.
            lent: whether the learner still holds the batch of the round before.
            ahead: rounds from the first one on that are in their slots already.
        """
        self.schedule.restart(first_round, lent=lent, ahead=ahead)
        self.actor_inbox.take_ready()
        self.learner_inbox.take_ready()
        self.port.restart(ahead)
        for actor in self.actors:
            self._send(actor, noise_seed)
        for index, executor in enumerate(self.executors):
            own = {env: starts[env] for env in self.environments(index)}
            self._send(executor, (own, first_round + ahead))

    def stop(self) -> None:
        """Bring everybody to rest: executors after the step they are at, then the actors."""
        for inbox in self.executor_inboxes:
            with contextlib.suppress(BrokenPipeError):  # it is gone: said by what follows
                inbox.post([STOP])
        self._receive_all(self.executors)
        self.actor_inbox.post([STOP] * self.num_actors)
        self._receive_all(self.actors)

    def save(self) -> list[bytes] | str:
        """The state of each environment, all of them parked; or why they can't be saved."""
        for inbox in self.executor_inboxes:
            with contextlib.suppress(BrokenPipeError):  # it is gone: said by what follows
                inbox.post([SAVE])
        states: dict[int, bytes] = {}
        for kind, content, _ in self._receive_all(self.executors):
            if kind == "unsaved":
                return str(content)
            states.update(content)
        return [states[env] for env in sorted(states)]

    def wait_full(self, round_: int) -> None:
        """Sleep until a round is full, or a worker has failed."""
        self.port.take_ready()
        while not self.port.is_full(round_):
            for fd, _ in self._poll.poll():
                if fd in self._by_fd:
                    self._read(self._by_fd[fd])
            self.port.take_ready()

    def release(self) -> None:
        """Open the next round: its slot holds the new parameters."""
        with contextlib.suppress(BrokenPipeError):  # an executor is gone: `wait_full` says which
            self.port.release()

    # Ending.

    def shutdown(self, timeout_s: float) -> None:
        """End every worker: politely, and by force after the time-out; may be called again."""
        with self._lock:
            if self.is_closed():
                return
            self.closed_at = time.monotonic()
        if os.getpid() != self._owner_pid:
            return  # a fork of the user's process: the workers aren't its own
        try:
            for inbox in self.executor_inboxes:
                with contextlib.suppress(OSError):  # each on its own: one executor may be gone
                    inbox.post([STOP])
            with contextlib.suppress(OSError):
                self.actor_inbox.post([STOP] * self.num_actors)
            for worker in self.workers:
                worker.hang_up()
            deadline = time.monotonic() + timeout_s
            for worker in self.workers:
                worker.exit_status(max(0.0, deadline - time.monotonic()))
        finally:  # a second Ctrl-C ends the wait, and leaves nothing behind either
            for worker in self.workers:
                worker.hang_up()
                worker.kill()
            for worker in self.workers:
                worker.exit_status(timeout_s)
                worker.close()
            for server in self._servers:
                release_server(server)
            for inbox in (*self.executor_inboxes, self.actor_inbox, self.learner_inbox):
                inbox.close()
            os.close(self.memory_fd)

    # Messages.

    def _acquire(self, preload: tuple[str, ...]) -> WorkerServer:
        server = acquire_server(preload)
        self._servers.append(server)
        return server

    def _watch(self, worker: WorkerProcess) -> None:
        for fd in worker.fds:
            self._by_fd[fd] = worker
            for poll in (self._poll, self._control_poll):
                poll.register(fd, select.POLLIN)

    def _forget(self, worker: WorkerProcess) -> None:
        for fd in worker.fds:
            del self._by_fd[fd]
            for poll in (self._poll, self._control_poll):
                poll.unregister(fd)
        worker.hang_up()
        worker.close()
        self.executors.remove(worker)

    def _send(self, worker: WorkerProcess, message: object) -> None:
        try:
            send_object(worker.control, message)
        except OSError:
            self._read(worker)
            raise

    def _receive(self, worker: WorkerProcess) -> Any:
        return self._receive_all([worker])[0]

    def _receive_all(self, workers: Sequence[WorkerProcess]) -> list[Any]:
        """A message from each worker, in their order."""
        messages: dict[int, Any] = {}
        while any(worker.pid not in messages for worker in workers):
            for fd, _ in self._control_poll.poll():
                worker = self._by_fd[fd]
                messages[worker.pid] = self._read(worker)
        return [messages[worker.pid] for worker in workers]

    def _read(self, worker: WorkerProcess) -> Any:
        """The next message of a worker; raises if it is a failure or the worker is gone."""
        try:
            if worker.has_ended() and not worker.control.poll(0):
                raise EOFError
            message = receive_object(worker.control)
        except (EOFError, OSError) as error:
            raise self._death(worker) from error
        kind, text, where = message
        if kind == "policy":
            raise PolicyError(text)
        if kind == "error":
            raise self._failure(worker, text, where)
        if kind == "inference":
            round_, envs = where
            raise WorkerError(
                f"the policy failed in round {round_}, for environment(s) "
                f"{', '.join(map(str, envs))}, in {worker.name} (pid {worker.pid}):",
                worker=worker.name,
                env_indices=envs,
                remote_traceback=text,
            )
        return message

    def _failure(
        self, worker: WorkerProcess, text: str, where: tuple[int, int | None, int | None] | None
    ) -> HTSError:
        if where is None:
            envs = self._environments_of(worker)
            message = f"{worker.name} (pid {worker.pid}) failed; its traceback:"
        else:
            env, round_, step = where
            envs = (env,)
            at = "while it was made" if round_ is None else f"in round {round_}, step {step}"
            message = f"environment {env} failed {at}, in {worker.name} (pid {worker.pid}):"
        return WorkerError(message, worker=worker.name, env_indices=envs, remote_traceback=text)

    def _death(self, worker: WorkerProcess) -> WorkerError:
        envs = self._environments_of(worker)
        serving = f", which steps environment(s) {', '.join(map(str, envs))}," if envs else ""
        return WorkerError(
            f"{worker.name} (pid {worker.pid}){serving} {worker.describe_end()}",
            worker=worker.name,
            env_indices=envs,
        )

    def _environments_of(self, worker: WorkerProcess) -> tuple[int, ...]:
        if worker in self.executors:
            return self.environments(self.executors.index(worker))
        return ()
