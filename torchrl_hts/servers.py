"""Worker servers that are shared: who uses them, and those of one collector."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from torchrl_hts.undivided import undivided
from torchrl_hts.workers import ServerEndedError, WorkerProcess, WorkerServer

__all__ = [
    "TORCH_FREE",
    "WITH_TORCH",
    "ServerPool",
    "Servers",
    "acquire_server",
    "keep_servers",
    "release_server",
]

TORCH_FREE = ("numpy", "gymnasium", "cloudpickle", "torchrl_hts.executor")
WITH_TORCH = (
    *TORCH_FREE,
    "torch",
    "torchrl.modules",
    "torchrl.envs",
    "torchrl_hts.actor",
    "torchrl_hts.torchrl_env",
    # Where they are installed: tensordict's modules import them in their first forward pass, which
    # would take each actor a quarter of a second, and tens of megabytes.
    "pandas",
    "h5py",
)


class ServerPool:
    """Servers by what they preload, with a count of who uses them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[tuple[str, ...], WorkerServer] = {}
        self._users: dict[WorkerServer, int] = {}
        self._pid = os.getpid()

    @undivided
    def acquire(self, preload: tuple[str, ...]) -> WorkerServer:
        """The server that has imported these modules; a new one if there is none that lives."""
        with self._lock:
            if self._pid != os.getpid():  # forked: those servers belong to our parent
                self._servers, self._users, self._pid = {}, {}, os.getpid()
            server = self._servers.get(preload)
            if server is None or server.has_ended():
                server = self._servers[preload] = WorkerServer(preload)
            self._users[server] = self._users.get(server, 0) + 1
            return server

    def release(self, server: WorkerServer) -> None:
        """Use a server no more; the last one to do so ends it."""
        if not self._leave(server):
            server.close()

    @undivided
    def _leave(self, server: WorkerServer) -> int:
        """Count a user less; returns how many are left."""
        with self._lock:
            self._users[server] = users = self._users.get(server, 1) - 1
            if not users:
                del self._users[server]
                for preload, known in list(self._servers.items()):
                    if known is server:
                        del self._servers[preload]
        return users


_pool = ServerPool()
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
        >>> from torchrl_hts.servers import TORCH_FREE, keep_servers
        >>> with keep_servers(TORCH_FREE):
        ...     pass  # make collectors here
    """
    servers = [_pool.acquire(preload) for preload in preloads or (TORCH_FREE, WITH_TORCH)]
    try:
        yield
    finally:
        for server in servers:
            _pool.release(server)


class Servers:
    """The servers that the workers of one collector come from; one that has ended is replaced.

    Attributes:
        with_torch: whether the executors' server is the one that has it.
    """

    def __init__(self) -> None:
        self.with_torch = False
        self._modules: list[str] = []
        self._lock = threading.Lock()
        self._current: dict[tuple[str, ...], WorkerServer] = {}
        self._held: list[WorkerServer] = []  # those too that have ended: their workers may ask
        self._released = False

    def begin(self) -> None:
        """Let a server import torch, which takes seconds, while environments are made."""
        self._server(WITH_TORCH)

    def preload(self, modules: Sequence[str]) -> None:
        """Let the executors' server import what environments need, once for all of them."""
        self._modules = list(modules)
        self._server(self._executors).preload(self._modules)

    def spawn_executor(self, name: str, target: str, fds: Sequence[int]) -> WorkerProcess:
        """Start a worker for environments; see `WorkerServer.spawn`."""
        return self._spawn(self._executors, name, target, fds)

    def spawn_actor(self, name: str, target: str, fds: Sequence[int]) -> WorkerProcess:
        """Start a worker for the policy; see `WorkerServer.spawn`."""
        return self._spawn(WITH_TORCH, name, target, fds)

    def release(self) -> None:
        """Use them no more; may be called again, and by any thread."""
        while (server := self._take_back()) is not None:
            release_server(server)

    @undivided
    def _take_back(self) -> WorkerServer | None:
        with self._lock:
            self._released = True
            return self._held.pop() if self._held else None

    @property
    def _executors(self) -> tuple[str, ...]:
        return WITH_TORCH if self.with_torch else TORCH_FREE

    def _spawn(
        self, preload: tuple[str, ...], name: str, target: str, fds: Sequence[int]
    ) -> WorkerProcess:
        try:
            return self._server(preload).spawn(name, target, fds)
        except ServerEndedError:  # just now, or because all has been shut down
            return self._server(preload).spawn(name, target, fds)

    def _server(self, preload: tuple[str, ...]) -> WorkerServer:
        """The one there is, or, if it has ended, a new one that imports what it had imported."""
        server = self._current.get(preload)
        if server is not None and not server.has_ended():
            return server
        new = self._acquire(preload)
        if server is not None and preload == self._executors:
            new.preload(self._modules)
        return new

    @undivided
    def _acquire(self, preload: tuple[str, ...]) -> WorkerServer:
        with self._lock:
            if self._released:
                raise RuntimeError("the worker servers have been released")
            server = self._current[preload] = acquire_server(preload)
            self._held.append(server)
        return server
