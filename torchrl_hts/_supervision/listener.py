"""The workers of one collector as its process hears of them: messages, failures, silence."""

from __future__ import annotations

import select
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from torchrl_hts._actor.messages import PolicyRefused
from torchrl_hts._executor.messages import Made, Observing
from torchrl_hts._processes.messages import receive_object, send_object
from torchrl_hts._processes.raised import Raised
from torchrl_hts._processes.worker_process import WorkerProcess
from torchrl_hts._rounds.replies import Failed
from torchrl_hts._supervision.failures import Site, died, failed, hung, raised
from torchrl_hts._supervision.progress import ProgressWatch
from torchrl_hts.errors import PolicyError, WorkerId

__all__ = ["Listener"]

Owing = Callable[[], Mapping[WorkerId, Hashable]]


class Listener:
    """Workers that are listened to. Every method may raise `WorkerError`: a worker has failed.

    Args:
        inbox_fd: the learner's inbox, which ends a wait too.
        timeouts_s: seconds without progress by kind of worker.
        site: where a worker is, for what is said of its failure.
        first_env: see below.

    Attributes:
        first_env: the number of this learner's environment 0 among those of all learners; of its
            first entry, until it is known how many environments entries make.
    """

    def __init__(
        self,
        inbox_fd: int,
        timeouts_s: Mapping[str, float],
        site: Callable[[WorkerProcess], Site],
        first_env: int = 0,
    ) -> None:
        self.made: set[int] = set()  # environments, as far as executors have said
        self.observing: set[int] = set()  # those that were asked for observations, likewise
        self._site_of = weakref.WeakMethod(site)  # of the supervisor, which holds us
        self.first_env = first_env
        self._watch = ProgressWatch(timeouts_s)
        self._by_fd: dict[int, WorkerProcess] = {}
        self._control_poll = select.poll()  # every worker's connection
        self._poll = select.poll()  # the same and the learner's inbox
        self._poll.register(inbox_fd, select.POLLIN)
        self._closed = False

    def add(self, worker: WorkerProcess) -> None:
        """Listen to a worker."""
        for fd in worker.fds:
            self._by_fd[fd] = worker
            for poll in (self._poll, self._control_poll):
                poll.register(fd, select.POLLIN)

    def dismiss(self, worker: WorkerProcess, *, politely: bool = False) -> None:
        """Make sure that a worker has ended, and listen to it no more; may be called again.

        Args:
            worker: the worker.
            politely: see `WorkerProcess.dismiss`.
        """
        for fd in worker.fds:
            if self._by_fd.get(fd) is worker:  # another may have been given the number since
                del self._by_fd[fd]
                for poll in (self._poll, self._control_poll):
                    poll.unregister(fd)
        worker.dismiss(politely=politely)

    def send(self, worker: WorkerProcess, message: object) -> None:
        """Send a message to a worker."""
        try:
            send_object(worker.control, message)
        except ConnectionError:
            self._read(worker)
            raise

    def receive_all(
        self, workers: Collection[WorkerProcess], progress: Callable[[], Hashable]
    ) -> list[Any]:
        """A message from each of some workers, in their order."""
        messages: dict[int, Any] = {}
        if not workers:
            return []
        for worker, message in self.messages(
            lambda: {w.id: progress() for w in workers if w.pid not in messages}
        ):
            messages[worker.pid] = message
            if all(worker.pid in messages for worker in workers):
                break
        return [messages[worker.pid] for worker in workers]

    def messages(self, owing: Owing) -> Iterator[tuple[WorkerProcess, Any]]:
        """What workers say, as it comes; without end.

        Args:
            owing: see `ProgressWatch.overdue`.
        """
        self._watch.forget()
        while True:
            for fd in self._wait(self._control_poll, owing):
                if fd in self._by_fd:  # it is no more, if its worker was dismissed meanwhile
                    worker = self._by_fd[fd]
                    message = self._read(worker)
                    if isinstance(message, Made):
                        self.made.add(message.env)
                    elif isinstance(message, Observing):
                        self.observing.add(message.env)
                    else:
                        yield worker, message

    def wait(self, owing: Owing) -> None:
        """Sleep until something is in the learner's inbox, or somebody has failed."""
        for fd in self._wait(self._poll, owing):
            if fd in self._by_fd:
                self._read(self._by_fd[fd])

    def close(self) -> None:
        """Let whoever waits here, or will, find out within a second that all is over."""
        self._closed = True

    def forget(self) -> None:
        """What was owed until now is settled."""
        self._watch.forget()

    def _site(self, worker: WorkerProcess) -> Site:
        site_of = self._site_of()
        return Site() if site_of is None else site_of(worker)

    def _wait(self, poll: select.poll, owing: Owing) -> Sequence[int]:
        """The descriptors that something can be read from."""
        interval_s = self._watch.interval_s
        timeout_ms = 1000 if interval_s is None else min(1000, max(1, int(1000 * interval_s)))
        while True:
            began = time.monotonic()
            ready = poll.poll(timeout_ms)
            if self._closed:  # the descriptors may be other people's by now
                raise RuntimeError("nobody is left to listen to")
            if interval_s is not None:
                if time.monotonic() - began > timeout_ms / 1000 + interval_s:
                    self._watch.forget()  # all of us stood still, as in a paused container
                late = self._watch.overdue(owing(), time.monotonic())
                for worker in {w for w in self._by_fd.values() if w.id == late}:
                    raise hung(worker, self._site(worker), self._watch.timeout_s(worker.id) or 0)
            if ready:
                return [fd for fd, _ in ready]

    def _read(self, worker: WorkerProcess) -> Any:
        """The next message of a worker; raises if it is a failure or the worker is gone."""
        try:
            if worker.has_ended() and not worker.control.poll(0):
                raise EOFError
            message = receive_object(worker.control)
        except (EOFError, ConnectionError) as error:
            raise died(worker, self._site(worker)) from error
        if isinstance(message, PolicyRefused):
            raise PolicyError(message.why)
        if isinstance(message, Failed):
            raise failed(worker, message, self.first_env)
        if isinstance(message, Raised):
            raise raised(worker, message, self._site(worker))
        return message
