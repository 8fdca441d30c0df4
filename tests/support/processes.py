"""Watching processes from tests: whether they live, and scripts that a test talks to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from torchrl_hts._processes.linux import ON_LINUX
from torchrl_hts._processes.server_pool import (
    TORCH_FREE,
    ServerUser,
    acquire_server,
    release_servers,
)

_HERE = Path(__file__).parent

needs_linux = pytest.mark.skipif(not ON_LINUX, reason="rests on what Linux offers beyond POSIX")


# Descriptors, by target. What rounds lie in: memory, or a file without a name.
BLOCKS = ("memfd:torchrl_hts", "/#", "torchrl_hts-")
COLLECTORS_OWN = (*BLOCKS, "pipe:", "socket:", "pidfd")
SHARED_SERVERS: set[int] = set()  # worker servers that outlive their test on purpose


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_below(pid: int) -> set[int]:
    """All descendants of a process."""
    below: set[int] = set()
    tasks = Path(f"/proc/{pid}/task")
    for task in tasks.iterdir() if tasks.exists() else ():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            for child in (task / "children").read_text().split():
                below |= {int(child), *processes_below(int(child))}
    return below


def open_descriptors(*kinds: str) -> set[tuple[int, str]]:
    """Number and target of this process's descriptors whose target has one of these in its name."""
    held = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            held.add((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
    return {(fd, target) for fd, target in held if any(kind in target for kind in kinds)}


def comes_from_torch_free_server(pid: int) -> bool:
    """Whether a worker was forked by the server that imports no torch, unless an environment has.

    What others have had it import since is of no concern.
    """
    user = ServerUser()
    try:
        return pid in processes_below(acquire_server(TORCH_FREE, user).pid)
    finally:
        release_servers(user)


def is_server(pid: int) -> bool:
    """Whether a process is one of those that fork workers, or a worker."""
    try:
        return "torchrl_hts._processes.fork_server_main" in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def shared_memory_segments() -> set[str]:
    """Names of the shared-memory segments of torch on this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


def segments_left(before: set[str], timeout_s: float = 20.0) -> set[str]:
    """Those that are new since ``before``, but for those of other tests that run beside this one.

    They are named after the process that made them. That of another test may just have ended, and
    its segments be about to go.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        own = {os.getpid(), *processes_below(os.getpid())}
        left = set()
        for name in shared_memory_segments() - before:
            maker = int(name.split("_")[1])
            if maker in own or not Path(f"/proc/{maker}").exists():
                left.add(name)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def group_of(leader: int) -> set[int]:
    """The processes of a group that run, whose leader may have ended."""
    members = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state not in "ZX":
                members.add(int(path.parent.name))
    return members


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return when the condition holds; fail after the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def wait_until_gone(pids: Iterable[int], timeout_s: float = 20.0) -> None:
    """Return when none of the processes runs any more."""
    pids = set(pids)
    wait_until(lambda: not any(map(alive, pids)), timeout_s)


@contextlib.contextmanager
def held_at(gate: str) -> Iterator[None]:
    """Wait until a process waits at a gate (`environments.GatedEnv`); let it go on in the end."""
    held: list[int] = []

    def somebody_waits() -> bool:
        with contextlib.suppress(OSError):  # no reader yet
            held.append(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        return bool(held)

    wait_until(somebody_waits)
    try:
        yield
    finally:
        os.close(held[0])


def script_environment() -> dict[str, str]:
    """The variables of a script that imports the package, and what lies beside this file."""
    path = os.pathsep.join([str(_HERE.parents[1]), str(_HERE)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


# A test that is killed takes its script along.
_ENDS_WITH_THE_TEST = """\
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
"""


class Script:
    """A user's script, run by a fresh interpreter in a session of its own.

    What it prints, a JSON text per line, is read with `receive`.
    """

    def __init__(self, path: Path, source: str, *args: str) -> None:
        path.write_text(_ENDS_WITH_THE_TEST + source)
        self.process = subprocess.Popen(
            [sys.executable, str(path), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=script_environment(),
            start_new_session=True,
        )

    def receive(self) -> Any:
        """What the script prints next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def wait(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """Exit status and standard error, once it has ended."""
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors

    def __enter__(self) -> Script:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
