"""What every test has: one thread, warm worker servers, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import socket
from collections.abc import Callable, Iterator

import pytest
import torch
from collectors import end_all
from fault_table import fault_table
from processes import (
    BLOCKS,
    SHARED_SERVERS,
    is_server,
    open_descriptors,
    processes_below,
    segments_left,
    shared_memory_segments,
)

from torchrl_hts import World
from torchrl_hts._processes.linux import allowed_cores
from torchrl_hts._processes.server_pool import (
    ServerUser,
    acquire_server,
    keep_servers,
    release_servers,
)
from torchrl_hts._rounds.shared_memory import SharedMemory


def pytest_xdist_auto_num_workers() -> int:
    """Twice as many tests at a time as there are cores: half of their time they wait for processes.

    But no more than eight where there are fewer cores: each takes a gigabyte.
    """
    cores = allowed_cores()
    return max(cores, min(2 * cores, 8))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported stays: the collections of `nothing_left` need not look at it


@pytest.fixture
def seeded_thread() -> Iterator[None]:
    """One thread, whatever the tests before have left, and torch's generator at its beginning."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shards() -> Iterator[World]:
    """A learner alone, of whose batch two shards are made."""
    threads = torch.get_num_threads()
    with World(shards=2) as world:
        yield world
    torch.set_num_threads(threads)


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
    """Workers, their servers and shared memory are gone after the test."""
    from torchrl_hts._processes.server_pool import TORCH_FREE, WITH_TORCH

    user = ServerUser()
    servers = [
        acquire_server(preload, user) for preload in (TORCH_FREE, WITH_TORCH)
    ]  # the warm ones
    kept = {server.pid for server in servers}
    before = processes_below(os.getpid())
    segments, blocks = shared_memory_segments(), open_descriptors(*BLOCKS)
    try:
        yield
        left = {pid for server in kept for pid in processes_below(server)}
        new = processes_below(os.getpid()) - kept - SHARED_SERVERS - before
        left |= {pid for pid in new if is_server(pid)}
        named = segments_left(segments)
        gc.collect()
        # The traceback of a test that has failed may hold some.
        mapped = open_descriptors(*BLOCKS) - blocks
        record_property("left", len(left) + len(named) + len(mapped))
        assert not left, f"worker processes {left} are left"
        assert not named
        assert not mapped, "a collector's memory is still mapped"
    finally:
        release_servers(user)


@pytest.fixture
def memory_fd() -> Iterator[int]:
    """Shared memory for an environment that a test steps itself."""
    fd = SharedMemory.create_fd()
    yield fd
    os.close(fd)


@pytest.fixture
def nobodys_address() -> Iterator[str]:
    """A place on this machine that is taken, and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def collectors_end(nothing_left: None) -> Iterator[None]:
    """Nothing is left after the test, and nothing of it goes on if it fails."""
    yield
    end_all()


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
