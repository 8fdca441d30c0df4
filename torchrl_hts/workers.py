"""Worker processes: fork servers that start them, watch them, and never leave one behind.

A `WorkerServer` is a small process that imports what its workers share (numpy and gymnasium, or
torch and torchrl) and forks a worker on request. Three things follow from that:

- the user's main script is never run again in a worker, so no ``if __name__`` guard is needed,
  and a worker imports torch only if its server has;
- workers are ready in milliseconds and share the memory of what the server imported;
- the server is the one parent of all workers: it reports each exit, ends its workers when the
  main process ends in whatever way (I8), and its own end kills them (``PR_SET_PDEATHSIG``).

File descriptors are all that the processes share: nothing has a name in the file system, so
nothing can stay behind there.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import cloudpickle

__all__ = [
    "TORCH_FREE",
    "WITH_TORCH",
    "WorkerProcess",
    "WorkerServer",
    "acquire_server",
    "keep_servers",
    "receive_object",
    "release_server",
    "send_object",
]

TORCH_FREE = ("numpy", "gymnasium", "cloudpickle", "torchrl_hts.executor")
WITH_TORCH = (
    *TORCH_FREE,
    "torch",
    "torchrl.modules",
    "torchrl.envs",
    "torchrl_hts.actor",
    "torchrl_hts.torchrl_env",
)

# Large blocks kept by malloc instead of being returned to the system after each forward pass:
# a third off a 16-row forward pass of the Nature CNN. One thread per worker, set on purpose: two
# OpenMP threads each on an oversubscribed machine collapse.
_WORKER_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 29),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

_HEADER = struct.Struct("!II")  # bytes of JSON that follow, file descriptors that come along
_MAX_FDS_PER_MESSAGE = 128
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29


class WorkerProcess:
    """A worker, as the main process sees it.

    Attributes:
        name: for messages, such as ``"executor 3"``.
        pid: its process id.
        control: two-way connection for jobs and failures; end of file means the worker is gone.
        fds: descriptors to poll: one becomes readable when there is a message or an end.
    """

    def __init__(self, name: str, pid: int, control: Connection, server: WorkerServer) -> None:
        self.name = name
        self.pid = pid
        self.control = control
        self._server = server
        # The connection doesn't tell the end of a worker whose environment has forked: the
        # environment's own processes hold a copy.
        self._end_fd = _watch(pid)
        self.fds = (control.fileno(), *(() if self._end_fd is None else (self._end_fd,)))

    @property
    def server_failure(self) -> str | None:
        """Why the server has ended, which ends the worker too; None as far as is known."""
        return self._server.failure

    def has_ended(self) -> bool:
        """Whether the worker is known to have ended; does not wait."""
        return self._end_fd is not None and _readable(self._end_fd, 0)

    def exit_status(self, timeout_s: float) -> int | None:
        """Exit code, or minus the signal that killed it; None if it runs on after the time."""
        return self._server.exit_status(self.pid, timeout_s)

    def hang_up(self) -> None:
        """Close the connection; the worker sees its end even if a fork holds a copy of ours."""
        if not self.control.closed:
            with (
                contextlib.suppress(OSError),  # the worker has gone already
                socket.socket(fileno=os.dup(self.control.fileno())) as connection,
            ):
                connection.shutdown(socket.SHUT_RDWR)
            self.control.close()

    def close(self) -> None:
        """Close the descriptors that `hang_up` leaves; may be called again."""
        if self._end_fd is not None:
            os.close(self._end_fd)
            self._end_fd = None

    def kill(self) -> None:
        """End the worker at once, if it has not ended yet."""
        if self._server.exit_status(self.pid, 0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class WorkerServer:
    """A process that forks workers on request.

    Args:
        preload: modules to import before the first fork, such as `TORCH_FREE`.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        # The path of the package first: it may not be installed in the interpreter's own path.
        bootstrap = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from torchrl_hts.workers import _serve; _serve({theirs.fileno()}, {os.getpid()})"
        )
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", bootstrap],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_WORKER_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the main process, which then ends us
        )
        theirs.close()
        self._socket = ours
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._owner_pid = os.getpid()
        self.failure: str | None = None
        self.preload(preload)

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        return self._process.pid

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules in the server, so that later workers share them; does not wait.

        A module that can't be imported there is left out: the worker that needs it will say so.
        """
        with self._lock:
            self._request({"preload": list(modules)}, [])

    def spawn(self, name: str, target: str, fds: Sequence[int]) -> WorkerProcess:
        """Fork a worker.

        Args:
            name: for messages.
            target: ``"module:function"``, called in the worker as ``function(control, fds)``.
            fds: file descriptors to hand to it, in this order.

        Raises:
            RuntimeError: if the server has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            self._request({"spawn": target}, [theirs.fileno(), *fds])
            while True:
                message = self._receive()
                if "pid" in message:
                    self._statuses.pop(message["pid"], None)  # of an earlier worker
                    break
        return WorkerProcess(name, message["pid"], Connection(ours.detach()), self)

    def exit_status(self, pid: int, timeout_s: float) -> int | None:
        """Exit code of a worker, or minus a signal; None if it hasn't ended within the time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:  # let go now and then: others may have a worker to start or to end
                if pid in self._statuses:
                    return self._statuses[pid]
                left_s = max(0.0, deadline - time.monotonic())
                try:
                    if _readable(self._socket.fileno(), min(left_s, 0.05)):
                        self._receive()
                    elif not left_s:
                        return None
                except RuntimeError as error:
                    # The server's end kills its workers.
                    self.failure = str(error)
                    return self._statuses.setdefault(pid, -signal.SIGKILL)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the server, and with it every worker that is left; may be called again."""
        if os.getpid() != self._owner_pid:
            self._socket.close()
            return  # a fork of the user's process: the server isn't its child
        with contextlib.suppress(RuntimeError), self._lock:
            # Said, not only shown by closing: a fork may hold a copy of our socket.
            self._request({"close": True}, [])
        self._socket.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _request(self, request: dict[str, Any], fds: list[int]) -> None:
        body = json.dumps(request).encode()
        try:
            self._socket.sendall(_HEADER.pack(len(body), len(fds)) + body)
            for start in range(0, len(fds), _MAX_FDS_PER_MESSAGE):
                socket.send_fds(self._socket, [b"f"], fds[start : start + _MAX_FDS_PER_MESSAGE])
        except OSError as error:
            raise RuntimeError(self._gone()) from error

    def _receive(self) -> dict[str, Any]:
        message = _read_message(self._socket)
        if message is None:
            raise RuntimeError(self._gone())
        if "status" in message:
            self._statuses[message["exited"]] = message["status"]
        return message

    def _gone(self) -> str:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(1.0)
        return f"the worker server (pid {self._process.pid}) ended (exit status {status})"


class _ServerPool:
    """Servers by what they preload, with a count of who uses them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[tuple[str, ...], WorkerServer] = {}
        self._users: dict[WorkerServer, int] = {}
        self._pid = os.getpid()

    def acquire(self, preload: tuple[str, ...]) -> WorkerServer:
        with self._lock:
            if self._pid != os.getpid():  # forked: those servers belong to our parent
                self._servers, self._users, self._pid = {}, {}, os.getpid()
            server = self._servers.get(preload)
            if server is None or server._process.poll() is not None:
                server = self._servers[preload] = WorkerServer(preload)
            self._users[server] = self._users.get(server, 0) + 1
            return server

    def release(self, server: WorkerServer) -> None:
        with self._lock:
            users = self._users.pop(server, 1) - 1
            if users:
                self._users[server] = users
                return
            for preload, known in list(self._servers.items()):
                if known is server:
                    del self._servers[preload]
        server.close()


_pool = _ServerPool()
acquire_server: Callable[[tuple[str, ...]], WorkerServer] = _pool.acquire
release_server: Callable[[WorkerServer], None] = _pool.release


@contextlib.contextmanager
def keep_servers(*preloads: tuple[str, ...]) -> Iterator[None]:
    """Keep worker servers alive between collectors, so that the next one starts at once.

    Without it a server ends with the last collector that uses it, and importing torch in a new
    one takes seconds. For tests and sweeps, which make many collectors one after the other.

    Args:
        preloads: `TORCH_FREE`, `WITH_TORCH` or both; both if none is given.

    Example:
        >>> from torchrl_hts.workers import TORCH_FREE, keep_servers
        >>> with keep_servers(TORCH_FREE):
        ...     pass  # make collectors here
    """
    servers = [_pool.acquire(preload) for preload in preloads or (TORCH_FREE, WITH_TORCH)]
    try:
        yield
    finally:
        for server in servers:
            _pool.release(server)


def send_object(control: Connection, message: object) -> None:
    """Send an object through a control connection, functions of the main script by value."""
    control.send_bytes(cloudpickle.dumps(message))


def receive_object(control: Connection) -> Any:
    """Receive what `send_object` has sent; None, or the other side's end, raises EOFError."""
    message = pickle.loads(control.recv_bytes())
    if message is None:
        raise EOFError
    return message


# What follows runs in the server process and in its workers.


def _serve(fd: int, main_pid: int) -> None:
    """Main loop of a server: requests come in, workers go out, exits are reported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _do_nothing)
    requests = socket.socket(fileno=fd)
    requests.set_inheritable(False)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    main_fd = _watch(main_pid)
    if main_fd is not None:
        poll.register(main_fd, select.POLLIN)
    workers: set[int] = set()
    try:
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if main_fd in ready:
                return
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                _report_exits(requests, workers)
            if requests.fileno() in ready:
                request = _read_message(requests)
                if request is None or "close" in request:
                    return
                if "preload" in request:
                    _preload(request["preload"])
                else:
                    fds = _read_fds(requests, request["fds"])
                    server_pid = os.getpid()
                    gc.freeze()  # collections in workers leave the shared pages alone
                    pid = os.fork()
                    if pid == 0:
                        _die_with_parent(server_pid)
                        ours = (requests.fileno(), wake_read, wake_write, main_fd)
                        _run_worker(request["spawn"], fds, [f for f in ours if f is not None])
                    workers.add(pid)
                    for worker_fd in fds:
                        os.close(worker_fd)
                    _send_message(requests, {"pid": pid})
    except (BrokenPipeError, ConnectionResetError):
        return  # the main process is gone
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        os._exit(0)  # unloading torch would take a second, and there is nothing to save


def _run_worker(target: str, fds: list[int], server_fds: list[int]) -> None:
    """Run a target in a freshly forked worker; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in server_fds:
            os.close(fd)
        _wake_on_time()
        control = Connection(fds[0])
        module, _, function = target.partition(":")
        try:
            getattr(importlib.import_module(module), function)(control, fds[1:])
            code = 0
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = 0  # the main process has closed its side
        except BaseException:
            with contextlib.suppress(OSError):
                send_object(control, ("error", traceback.format_exc(), None))
        control.close()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _preload(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException:  # the worker that needs it meets the same error and reports it
            continue


def _report_exits(requests: socket.socket, workers: set[int]) -> None:
    while workers:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        workers.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        _send_message(requests, {"exited": pid, "status": code})


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before prctl
            os._exit(1)


def _wake_on_time() -> None:
    """Let environments that sleep wake up to the microsecond, not up to 50 of them later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # in nanoseconds


def _watch(pid: int) -> int | None:
    """A descriptor that becomes readable when a process ends.

    Needed where a fork of the main process outlives it and keeps our socket open; elsewhere than
    on Linux the end of the socket has to do.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _readable(fd: int, timeout_s: float) -> bool:
    """Whether there is something to read; unlike ``select``, for any number of descriptors."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Handle SIGCHLD: the wake-up descriptor does the work."""


def _send_message(sock: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    sock.sendall(_HEADER.pack(len(body), 0) + body)


def _read_message(sock: socket.socket) -> dict[str, Any] | None:
    header = _read_exactly(sock, _HEADER.size)
    if header is None:
        return None
    size, num_fds = _HEADER.unpack(header)
    body = _read_exactly(sock, size)
    if body is None:
        return None
    message: dict[str, Any] = json.loads(body)
    message["fds"] = num_fds
    return message


def _read_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        try:
            part = sock.recv(size - len(data))
        except ConnectionResetError:
            return None
        if not part:
            return None
        data += part
    return data


def _read_fds(sock: socket.socket, count: int) -> list[int]:
    fds: list[int] = []
    while len(fds) < count:
        expected = min(_MAX_FDS_PER_MESSAGE, count - len(fds))
        _, received, _, _ = socket.recv_fds(sock, 1, expected)
        if len(received) != expected:
            raise BrokenPipeError("the main process ended while it handed file descriptors over")
        fds.extend(received)
    return fds
