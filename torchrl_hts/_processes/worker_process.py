"""A worker, as the main process sees it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import weakref
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from torchrl_hts._processes.linux import watch_end
from torchrl_hts._processes.messages import readable
from torchrl_hts._processes.process_groups import end_group
from torchrl_hts._processes.shutdown_once import endings_wait
from torchrl_hts.errors import WorkerId

if TYPE_CHECKING:
    from torchrl_hts._processes.fork_server import WorkerServer

__all__ = ["POLITE_S", "WorkerProcess"]

# How long workers may take to end by themselves: then everything is gone after 5 s in all.
POLITE_S = 4.0


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


class WorkerProcess:
    """A worker, as the main process sees it.

    Attributes:
        id: which worker it is.
        pid: its process id.
        control: two-way connection for jobs and failures; end of file means the worker is gone.
        fds: descriptors to poll: one becomes readable when there is a message or an end.
    """

    def __init__(
        self, worker_id: WorkerId, pid: int, control: Connection, server: WorkerServer
    ) -> None:
        self.id = worker_id
        self.pid = pid
        self.control = control
        self._server = server
        self._lock = threading.RLock()
        # The connection doesn't tell the end of a worker whose environment has forked: the
        # environment's own processes hold a copy.
        self._end_fd = watch_end(pid)
        # Also if an exception comes before anybody has this object.
        self._close_end = weakref.finalize(self, _close, self._end_fd)
        self._close_end.atexit = False
        self.fds = (control.fileno(), *(() if self._end_fd is None else (self._end_fd,)))

    @property
    def name(self) -> str:
        """For messages, such as ``"executor 3"``."""
        return str(self.id)

    @property
    def server_failure(self) -> str | None:
        """Why the server has ended, which ends the worker too; None as far as is known."""
        return self._server.failure

    @endings_wait
    def has_ended(self) -> bool:
        """Whether the worker is known to have ended; does not wait."""
        with self._lock:
            if self._end_fd is None or not self._close_end.alive:
                return False
            return readable(self._end_fd, 0)

    def exit_status(self, timeout_s: float) -> int | None:
        """Exit code, or minus the signal that killed it; None if it runs on after the time."""
        return self._server.exit_status(self.pid, timeout_s)

    @endings_wait
    def hang_up(self) -> None:
        """Close the connection; the worker sees its end even if a fork holds a copy of ours."""
        with self._lock:
            if not self.control.closed:
                with (
                    contextlib.suppress(OSError),  # the worker has gone already
                    socket.socket(fileno=os.dup(self.control.fileno())) as connection,
                ):
                    connection.shutdown(socket.SHUT_RDWR)
                self.control.close()

    @endings_wait
    def close(self) -> None:
        """Close the descriptors that `hang_up` leaves; may be called again."""
        with self._lock:
            self._close_end()

    def dismiss(self, *, politely: bool = False) -> None:
        """Make sure that the worker has ended, and has nothing open here; may be called again.

        Args:
            politely: whether it may take its time to close its environments.
        """
        self.hang_up()
        if politely:
            self.exit_status(POLITE_S)
        self.kill()
        self.exit_status(5.0)
        self.close()

    def describe_end(self) -> str:
        """How the worker has ended, for people."""
        status = self.exit_status(5.0)
        if self.server_failure:
            return f"was killed: {self.server_failure}"
        if status is None:
            return "closed its connection"
        if status == -signal.SIGKILL:
            return "was killed by SIGKILL (by hand, or by the system for want of memory)"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit code {status}"

    def stderr(self) -> str:
        """The last lines that it has written to stderr, whether it lives or has ended."""
        return self._server.stderr(self.pid)

    def abort(self, timeout_s: float) -> None:
        """End a worker that hangs by SIGABRT: its stderr then says where it was."""
        if self._server.exit_status(self.pid, 0) is None:
            with contextlib.suppress(OSError):
                if hasattr(resource, "prlimit"):  # a traceback is enough: no core file
                    limits = resource.prlimit(self.pid, resource.RLIMIT_CORE)
                    resource.prlimit(self.pid, resource.RLIMIT_CORE, (0, limits[1]))
                os.kill(self.pid, signal.SIGABRT)
            self._server.exit_status(self.pid, timeout_s)

    def kill(self) -> None:
        """End the worker at once, and what its environments have started; may be called again."""
        if self._server.exit_status(self.pid, 0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        elif self._server.took_along(self.pid):  # otherwise the server has seen to it
            end_group(self.pid)
