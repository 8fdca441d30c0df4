"""Fork servers, which start worker processes, watch them, and never leave one behind.

A `WorkerServer` is a small process that imports what its workers share (numpy and gymnasium, or
torch and torchrl) and forks a worker on request. Three things follow from that:

- the user's main script is never run again in a worker, so no ``if __name__`` guard is needed,
  and a worker imports torch only if its server has;
- workers are ready in milliseconds and share the memory of what the server imported;
- the server is the one parent of all workers. It reports each exit, and ends its workers when the
  main process ends in whatever way (I8). Its own end kills them (``PR_SET_PDEATHSIG``).

File descriptors are all that the processes share: nothing has a name in the file system, so
nothing can stay behind there.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from torchrl_hts._processes.messages import read_message, readable, send_message
from torchrl_hts._processes.shutdown_once import endings_wait
from torchrl_hts._processes.standard_descriptors import fill_standard_descriptors
from torchrl_hts._processes.surroundings import WORKER_ENVIRONMENT
from torchrl_hts._processes.worker_process import WorkerProcess
from torchrl_hts.errors import ResourceError, WorkerId

__all__ = ["ServerEndedError", "WorkerServer"]

_NOTHING = pickle.dumps(())  # is inherited

# Sets of strings are iterated in the same order in each run, unless the user asks for another.
_DEFAULT_ENVIRONMENT = {"PYTHONHASHSEED": "0"}

_REMEDIES = collections.defaultdict(
    str,
    {
        errno.EMFILE: "Allow more open files (ulimit -n), or use fewer num_executors",
        errno.ENFILE: "The whole system has too many open files",
        errno.EAGAIN: "Allow more processes (ulimit -u, or the pids limit of the container), or "
        "use fewer num_executors and num_actors",
        errno.ENOMEM: "The system is out of memory: use fewer num_executors and num_actors",
    },
)


def _refused(name: str, why: object, number: int | None) -> ResourceError:
    """The system has not let a process of that name be started; ``number`` is its errno."""
    remedy = _REMEDIES[number] if number is not None else ""
    return ResourceError(f"{name} could not be started: {why}. {remedy}")


def _socket_pair(name: str) -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection to a process of that name that is to be started."""
    try:
        fill_standard_descriptors()
        return socket.socketpair()
    except OSError as error:
        raise _refused(name, error, error.errno) from error


class ServerEndedError(ResourceError):
    """A worker server can't be asked any more; its workers end with it."""


class WorkerServer:
    """A process that forks workers on request.

    Args:
        preload: modules to import before the first fork, such as `TORCH_FREE`.

    Raises:
        ResourceError: if the system has too few processes or file descriptors.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = _socket_pair("a server of workers")
        # The path of the package first: it may not be installed in the interpreter's own path.
        bootstrap = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from torchrl_hts._processes.fork_server_main import serve; "
            f"serve({theirs.fileno()}, {os.getpid()})"
        )
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *flags, "-c", bootstrap],
                    pass_fds=[theirs.fileno()],
                    env={**_DEFAULT_ENVIRONMENT, **os.environ, **WORKER_ENVIRONMENT},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the main process, which then ends us
                )
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise _refused("a server of workers", error, error.errno) from error
            raise
        self._socket = ours
        # Reentrant: a signal handler may shut down while this thread waits for an answer.
        self._lock = threading.RLock()
        self._statuses: dict[int, int] = {}
        self._stderr: dict[int, str] = {}
        self._owner_pid = os.getpid()
        self._numbers = itertools.count()
        self._answers: dict[int, dict[str, Any] | None] = {}  # None: not there yet
        self._taken_along: set[int] = set()
        self.failure: str | None = None
        self.preload(preload)

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        return self._process.pid

    @endings_wait
    def has_ended(self) -> bool:
        """Whether the server has ended; does not wait."""
        return self._process.poll() is not None

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules in the server, so that later workers share them; does not wait.

        A module that can't be imported there is left out: the worker that needs it will say so.
        """
        with self._lock:
            self._request({"preload": list(modules)}, [])

    def spawn(
        self, worker_id: WorkerId, target: str, fds: Sequence[int], inheritance: bytes = _NOTHING
    ) -> WorkerProcess:
        """Fork a worker.

        Args:
            worker_id: which worker it will be.
            target: ``"module:function"``, called in the worker as ``function(control, fds)``.
            fds: file descriptors to hand to it, in this order.
            inheritance: pickled objects whose ``take_over`` is called before; see `Surroundings`.

        Raises:
            ServerEndedError: if the server has ended.
            ResourceError: if the system has too few processes or file descriptors.
        """
        ours, theirs = _socket_pair(str(worker_id))
        try:
            with theirs:
                message = self._ask(
                    {"spawn": target, "name": str(worker_id)}, [theirs.fileno(), *fds]
                )
        except BaseException:
            ours.close()  # which ends the worker, should one be started all the same
            raise
        if "refused" in message:
            ours.close()
            raise _refused(str(worker_id), message["why"], message["refused"])
        worker = WorkerProcess(worker_id, message["pid"], Connection(ours.detach()), self)
        try:
            worker.control.send_bytes(inheritance)
        except ConnectionError:
            pass  # it has ended, as whoever waits for it will find out
        except BaseException:
            worker.hang_up()
            worker.close()
            raise
        return worker

    def stderr(self, pid: int) -> str:
        """The last lines that a worker has written to stderr; empty if the server has ended."""
        with contextlib.suppress(ServerEndedError):
            if pid not in self._stderr:
                return str(self._ask({"stderr_of": pid}, [])["stderr"]) or self._stderr.get(pid, "")
        return self._stderr.get(pid, "")

    def exit_status(self, pid: int, timeout_s: float) -> int | None:
        """Exit code of a worker, or minus a signal; None if it hasn't ended within the time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:  # let go now and then: others may have a worker to start or to end
                if pid in self._statuses:
                    return self._statuses[pid]
                left_s = max(0.0, deadline - time.monotonic())
                try:
                    if not self._receive(min(left_s, 0.05)) and not left_s:
                        return None
                except ServerEndedError as error:
                    # The server's end kills its workers.
                    self.failure = str(error)
                    self._taken_along.add(pid)
                    return self._statuses.setdefault(pid, -signal.SIGKILL)

    def took_along(self, pid: int) -> bool:
        """Whether a worker has ended because the server has."""
        return pid in self._taken_along

    def close(self, timeout_s: float = 5.0) -> None:
        """End the server, and with it every worker that is left; may be called again."""
        if os.getpid() != self._owner_pid:
            self._socket.close()
            return  # a fork of the user's process: the server isn't its child
        with contextlib.suppress(ServerEndedError), self._lock:
            # Said, not only shown by closing: a fork may hold a copy of our socket.
            self._request({"close": True}, [])
        self._await_end(timeout_s)

    @endings_wait
    def _await_end(self, timeout_s: float) -> None:
        self._socket.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        """The answer to a request; what else is reported meanwhile is noted.

        Answers to a request whose caller was interrupted are passed over. A worker that was started
        for one ends by itself: nobody holds the other end of its connection.
        """
        number = next(self._numbers)
        self._answers[number] = None
        try:
            with self._lock:
                self._request({"id": number, **request}, fds)
            while (answer := self._answers[number]) is None:
                with self._lock:  # let go now and then: others may have a worker to end
                    if self._answers[number] is None:
                        self._receive(0.05)
            return answer
        finally:
            del self._answers[number]

    def _request(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        for fd in fds:
            os.fstat(fd)  # closed by another thread: then nothing is sent
        self._send(request, fds)

    @endings_wait
    def _send(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        try:
            send_message(self._socket, request, fds)
        except BaseException as error:
            self._give_up(error)
            raise

    def _receive(self, timeout_s: float) -> bool:
        """Take a message in and note it; False if none came within the time."""
        with contextlib.suppress(ValueError):  # the socket is closed, which is found out below
            if not readable(self._socket.fileno(), timeout_s):  # where Ctrl-C does no harm
                return False
        return self._take_in()

    @endings_wait
    def _take_in(self) -> bool:
        try:
            if not readable(self._socket.fileno(), 0):
                return False  # a signal handler has waited for something too, and taken it in
            message = read_message(self._socket)
            if message is None:
                raise BrokenPipeError
        except BaseException as error:
            self._give_up(error)
            raise
        if "status" in message:
            self._stderr[message["exited"]] = message["stderr"]
            self._statuses[message["exited"]] = message["status"]
            return True
        if "pid" in message:  # which an earlier worker may have had
            self._statuses.pop(message["pid"], None)
            self._stderr.pop(message["pid"], None)
        if message["id"] in self._answers:
            self._answers[message["id"]] = message
        return True

    def _give_up(self, error: BaseException) -> None:
        """End a server that was interrupted within a message: the next would not be understood.

        Raises:
            ServerEndedError: if what interrupted it is its own end, or its socket was closed.
        """
        self._process.kill()
        gone = isinstance(error, ConnectionError) or self._socket.fileno() < 0
        if gone and isinstance(error, Exception):
            raise ServerEndedError(self._gone()) from error

    def _gone(self) -> str:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(1.0)
        why = ": it may have printed why" if (status or 0) > 0 else ""
        return f"the worker server (pid {self._process.pid}) ended (exit status {status}){why}"
