"""Worker servers that are shared: who uses them, and those of one collector."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from weakref import WeakSet

from torchrl_hts._processes.fork_server import ServerEndedError, WorkerServer
from torchrl_hts._processes.messages import pickled
from torchrl_hts._processes.modes import TensorDictModes, TorchModes
from torchrl_hts._processes.registrations import Registrations
from torchrl_hts._processes.shutdown_once import Ending, endings_wait
from torchrl_hts._processes.surroundings import Surroundings
from torchrl_hts._processes.worker_process import WorkerProcess
from torchrl_hts.errors import WorkerId

__all__ = [
    "TORCH_FREE",
    "WITH_TORCH",
    "ServerPool",
    "ServerUser",
    "Servers",
    "acquire_server",
    "keep_servers",
    "release_servers",
]

TORCH_FREE = ("numpy", "gymnasium", "cloudpickle", "torchrl_hts._executor.loop")
WITH_TORCH = (
    *TORCH_FREE,
    "torch",
    "torchrl.modules",
    "torchrl.envs",
    "torchrl_hts._actor.loop",
    "torchrl_hts._executor.torchrl_env",
    # Where they are installed: tensordict's modules import them in their first forward pass, which
    # would take each actor a quarter of a second, and tens of megabytes.
    "pandas",
    "h5py",
)

# A pickled factory that speaks of TorchRL, though not of our own environments, most likely makes
# one of its environments. A wrong guess costs time alone.
_TORCHRL = re.compile(rb"torchrl(?!_hts)")


class ServerUser:
    """Somebody who uses servers, for as long as it exists and has not released them."""


class ServerPool:
    """Servers by what they preload, and who uses them.

    Users are known by themselves and not by a count, so that what an exception has cut short can be
    done again. Servers that nobody uses any more end at the next release, whosever it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[tuple[str, ...], WorkerServer] = {}
        self._users: dict[WorkerServer, WeakSet[ServerUser]] = {}
        self._pid = os.getpid()

    @endings_wait
    def acquire(self, preload: tuple[str, ...], user: ServerUser) -> WorkerServer:
        """The server that has imported these modules; a new one if there is none that lives."""
        with self._lock:
            if self._pid != os.getpid():  # forked: those servers belong to our parent
                self._servers, self._users, self._pid = {}, {}, os.getpid()
            server = self._servers.get(preload)
            if server is None or server.has_ended():
                server = self._servers[preload] = WorkerServer(preload)
            self._users.setdefault(server, WeakSet()).add(user)
            return server

    def release(self, user: ServerUser) -> None:
        """Use no server any more; those that nobody else uses end. May be called again."""
        while (server := self._leave(user)) is not None:
            server.close()
            self._forget(server)

    @endings_wait
    def _leave(self, user: ServerUser) -> WorkerServer | None:
        """Leave what others use; returns one that nobody else does, if there is one."""
        with self._lock:
            for server in dict.fromkeys((*self._users, *self._servers.values())):
                users = self._users.setdefault(server, WeakSet())
                if set(users) - {user}:
                    users.discard(user)
                    continue
                users.add(user)  # until it has ended
                for preload, known in list(self._servers.items()):
                    if known is server:
                        del self._servers[preload]
                return server
        return None

    @endings_wait
    def _forget(self, server: WorkerServer) -> None:
        with self._lock:
            self._users.pop(server, None)


_pool = ServerPool()
acquire_server: Callable[[tuple[str, ...], ServerUser], WorkerServer] = _pool.acquire
release_servers: Callable[[ServerUser], None] = _pool.release


@contextlib.contextmanager
def keep_servers(*preloads: tuple[str, ...]) -> Iterator[None]:
    """Keep worker servers alive between collectors, so that the next one starts at once.

    Without it a server ends with the last collector that uses it, and importing torch in a new
    one takes seconds. For tests and sweeps, which make many collectors one after the other.

    Args:
        preloads: what each server imports before, a tuple of names of modules; by default one
            server has torch and one has not.

    Raises:
        TypeError: for anything else.

    Example:
        >>> from torchrl_hts import keep_servers
        >>> with keep_servers():
        ...     pass  # make collectors here
    """
    for preload in preloads:
        if not isinstance(preload, tuple) or not all(isinstance(name, str) for name in preload):
            raise TypeError(
                f"keep_servers takes tuples of names of modules, such as ('numpy',), got "
                f"{preload!r}: leave it out for the servers that collectors use"
            )
    user = ServerUser()
    ending = Ending()  # the garbage collector may close a generator at any moment
    release = partial(ending, partial(_pool.release, user))
    is_finalizing = sys.is_finalizing  # modules have lost their names by then
    try:
        atexit.register(release)
        for preload in preloads or (TORCH_FREE, WITH_TORCH):
            _pool.acquire(preload, user)
        yield
    finally:
        if not is_finalizing():
            release()
            atexit.unregister(release)


class Servers:
    """The servers that the workers of one collector come from; one that has ended is replaced.

    All workers inherit what this process hands down at the moment in which this object is made, and
    those that make environments what it has registered.

    Attributes:
        with_torch: whether the executors' server is the one that has it.
    """

    def __init__(self) -> None:
        both = (Surroundings.here(), TensorDictModes.here())
        self._for_actors = pickled((*both, TorchModes.here()))
        self._for_executors = pickled((*both, Registrations.here()))
        self.with_torch = False
        self._modules: list[str] = []
        self._lock = threading.Lock()
        self._current: dict[tuple[str, ...], WorkerServer] = {}
        self._user = ServerUser()  # of those too that have ended: their workers may ask
        self._released = False

    def begin(self, factories: Sequence[bytes]) -> None:
        """Let a server import torch, which takes seconds, while environments are made.

        Args:
            factories: of the environments, pickled: whether these need torch is guessed from them.
        """
        self._server(WITH_TORCH)
        self.with_torch = self.with_torch or any(map(_TORCHRL.search, set(factories)))

    def preload(self, modules: Sequence[str]) -> None:
        """Let the executors' server import what environments have, once for all of them."""
        self._modules = [name for name in modules if name != "__main__"]
        self._server(self._executors).preload(self._modules)

    def spawn_executor(self, worker_id: WorkerId, target: str, fds: Sequence[int]) -> WorkerProcess:
        """Start a worker for environments; see `WorkerServer.spawn`."""
        return self._spawn(self._executors, worker_id, target, fds, self._for_executors)

    def spawn_actor(self, worker_id: WorkerId, target: str, fds: Sequence[int]) -> WorkerProcess:
        """Start a worker for the policy; see `WorkerServer.spawn`."""
        return self._spawn(WITH_TORCH, worker_id, target, fds, self._for_actors)

    def release(self) -> None:
        """Use them no more; may be called again, and by any thread."""
        self._refuse()
        release_servers(self._user)

    @endings_wait
    def _refuse(self) -> None:
        with self._lock:
            self._released = True

    @property
    def _executors(self) -> tuple[str, ...]:
        return WITH_TORCH if self.with_torch else TORCH_FREE

    def _spawn(
        self,
        preload: tuple[str, ...],
        worker_id: WorkerId,
        target: str,
        fds: Sequence[int],
        inheritance: bytes,
    ) -> WorkerProcess:
        with contextlib.suppress(ServerEndedError):  # just now, or because all has been shut down
            return self._server(preload).spawn(worker_id, target, fds, inheritance)
        return self._server(preload).spawn(worker_id, target, fds, inheritance)

    def _server(self, preload: tuple[str, ...]) -> WorkerServer:
        """The one there is, or, if it has ended, a new one that imports what it had imported."""
        server = self._current.get(preload)
        if server is not None and not server.has_ended():
            return server
        new = self._acquire(preload)
        if server is not None and preload == self._executors:
            new.preload(self._modules)
        return new

    @endings_wait
    def _acquire(self, preload: tuple[str, ...]) -> WorkerServer:
        with self._lock:
            if self._released:
                raise RuntimeError("the worker servers have been released")
            server = self._current[preload] = acquire_server(preload, self._user)
        return server
