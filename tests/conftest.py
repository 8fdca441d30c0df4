"""What every test has: one thread, warm worker servers, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fault_table import fault_table

from torchrl_hts.system import allowed_cores
from torchrl_hts.workers import acquire_server, keep_servers, release_server


def processes_below(pid: int) -> set[int]:
    """All descendants of a process."""
    below: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            for child in (task / "children").read_text().split():
                below |= {int(child), *processes_below(int(child))}
    return below


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


def mapped_blocks() -> list[str]:
    """The blocks of shared memory that this process still holds."""
    descriptors = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    targets = [os.readlink(fd) for fd in descriptors if os.path.lexists(fd)]
    return [target for target in targets if "memfd:torchrl_hts" in target]


def pytest_xdist_auto_num_workers() -> int:
    """More tests at a time than cores: half of their time they wait for processes to start or end.

    But not many more than eight, each of which takes a gigabyte.
    """
    cores = allowed_cores()
    return max(cores, min(2 * cores, 8))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported stays: the collections of `nothing_left` need not look at it


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Ctrl-C reaches what tests start, also where the tests were started in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def warm_servers() -> Iterator[None]:
    """Import torch once per test process, not once per collector."""
    with keep_servers():
        yield


@pytest.fixture
def nothing_left(
    warm_servers: None, record_property: Callable[[str, object], None]
) -> Iterator[None]:
    """Workers, shared memory and descriptors are gone after the test."""
    from torchrl_hts.workers import TORCH_FREE, WITH_TORCH

    servers = [acquire_server(TORCH_FREE), acquire_server(WITH_TORCH)]  # the warm ones
    kept = {server.pid for server in servers}
    segments = shared_memory_segments()
    try:
        yield
        left = {pid for server in kept for pid in processes_below(server)}
        named = segments_left(segments)
        gc.collect()
        mapped = mapped_blocks()
        record_property("left", len(left) + len(named) + len(mapped))
        assert not left, f"worker processes {left} are left"
        assert not named
        assert not mapped, "a collector's memory is still mapped"
    finally:
        for server in servers:
            release_server(server)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the examples of docstrings whose optional package isn't installed."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name.endswith(".make_football"):
            missing = importlib.util.find_spec("envpool") is None
            item.add_marker(pytest.mark.skipif(missing, reason="envpool is not installed"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which faults were tried (tests/faults), and what came of them."""
    lines = fault_table(terminalreporter.stats)
    if lines:
        terminalreporter.section("faults")
    for line in lines:
        terminalreporter.write_line(line)
