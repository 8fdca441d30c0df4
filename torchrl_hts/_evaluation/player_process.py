"""The process that plays evaluation episodes, as the main process sees it."""

from __future__ import annotations

import os
import select
from copy import copy
from pathlib import Path
from typing import Any

from torchrl_hts._evaluation.messages import PlayerRefused
from torchrl_hts._processes.messages import pickled, receive_object, send_object
from torchrl_hts._processes.modes import TensorDictModes, TorchModes
from torchrl_hts._processes.raised import Raised
from torchrl_hts._processes.registrations import Registrations
from torchrl_hts._processes.server_pool import (
    WITH_TORCH,
    ServerUser,
    acquire_server,
    release_servers,
)
from torchrl_hts._processes.shutdown_once import Ending
from torchrl_hts._processes.surroundings import Surroundings
from torchrl_hts._processes.worker_process import POLITE_S
from torchrl_hts._supervision.failures import Site, died, raised
from torchrl_hts.errors import WorkerError, WorkerId

__all__ = ["PlayerProcess"]

_ENDED = "the evaluator has been shut down"


class PlayerProcess:
    """The playing process, as the main process sees it.

    Args:
        memory_fd: of the shared memory.
        leftover: a file that it may leave behind if it is killed.

    Raises:
        WorkerError: from `check`, `send` and `receive`, if the process has failed.
    """

    def __init__(self, memory_fd: int, leftover: Path | None) -> None:
        self._leftover = leftover
        self._owner_pid = os.getpid()
        self._closed = False
        self._ending = Ending()
        self._busy = False
        # Copies are raised: the one that is raised keeps alive what its traceback passes through.
        self._failure: WorkerError | None = None
        self._user = ServerUser()
        inheritance = pickled(
            (Surroundings.here(), TensorDictModes.here(), TorchModes.here(), Registrations.here())
        )
        try:
            server = acquire_server(WITH_TORCH, self._user)
            target = "torchrl_hts._evaluation.player:run_player"
            self.worker = server.spawn(WorkerId("evaluator"), target, [memory_fd], inheritance)
            self._poll = select.poll()
            for fd in self.worker.fds:
                self._poll.register(fd, select.POLLIN)
        except BaseException:
            release_servers(self._user)
            raise

    def check(self) -> None:
        """Raise if the process has failed or been shut down."""
        if self._failure is not None:
            raise copy(self._failure)
        if self._closed:
            raise RuntimeError(_ENDED)

    def send(self, message: object) -> None:
        """Send a message to the process, which waits for one."""
        self._busy = True
        try:
            send_object(self.worker.control, message)
        except ConnectionError:
            self.receive("before it was given work")
            raise
        except BaseException:
            self.shutdown()  # interrupted within a message: the next would not be understood
            raise

    def has_news(self, *, wait: bool) -> bool:
        """Whether there is a message, or the process has ended."""
        while not (news := self._poll.poll(1000 if wait else 0)) and wait:
            self.check()
        return bool(news)

    def receive(self, doing: str) -> Any:
        """The next message; waits for it.

        Args:
            doing: what the process does meanwhile, for the message of a WorkerError.
        """
        self.has_news(wait=True)
        try:
            if self.worker.has_ended() and not self.worker.control.poll(0):
                raise EOFError
            message = receive_object(self.worker.control)
        except (EOFError, ConnectionError) as error:
            if self._closed:  # meanwhile, by another thread or a signal handler
                raise RuntimeError(_ENDED) from error
            raise self._fail(died(self.worker, Site(text=f" {doing}"))) from error
        except BaseException:
            self.shutdown()
            raise
        self._busy = False
        if isinstance(message, Raised):
            raise self._fail(raised(self.worker, message, Site(text=f" {doing}")))
        if isinstance(message, PlayerRefused):
            raise TypeError(message.why)
        return message

    def _fail(self, failure: WorkerError) -> WorkerError:
        self._failure = failure
        return copy(failure)

    def shutdown(self) -> None:
        """End the process: at once if it plays, which nobody waits for any more; see `Ending`."""
        self._closed = True
        if os.getpid() == self._owner_pid:  # not in a fork of the user's process
            self._ending(self._end)

    def _end(self) -> None:
        try:
            self.worker.hang_up()
            if not self._busy:
                self.worker.exit_status(POLITE_S)  # it closes its environments
        finally:
            self.worker.kill()
            self.worker.exit_status(5.0)
            self.worker.close()
            release_servers(self._user)
            if self._leftover is not None:
                self._leftover.unlink(missing_ok=True)
