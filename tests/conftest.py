"""What every test has: one thread, warm worker servers, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
    """Names of the shared-memory segments of this machine."""
    return set(os.listdir("/dev/shm"))


def mapped_blocks() -> list[str]:
    """The blocks of shared memory that this process still holds."""
    descriptors = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    targets = [os.readlink(fd) for fd in descriptors if os.path.lexists(fd)]
    return [target for target in targets if "memfd:torchrl_hts" in target]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported stays: the collections of `nothing_left` need not look at it


@pytest.fixture(scope="session")
def warm_servers() -> Iterator[None]:
    """Import torch once per test process, not once per collector."""
    with keep_servers():
        yield


@pytest.fixture
def nothing_left(warm_servers: None) -> Iterator[None]:
    """Workers, shared memory and descriptors are gone after the test."""
    from torchrl_hts.workers import TORCH_FREE, WITH_TORCH

    servers = [acquire_server(TORCH_FREE), acquire_server(WITH_TORCH)]  # the warm ones
    kept = {server.pid for server in servers}
    segments = shared_memory_segments()
    try:
        yield
        left = {pid for server in kept for pid in processes_below(server)}
        assert not left, f"worker processes {left} are left"
        new = shared_memory_segments() - segments
        assert not {name for name in new if name.startswith(("torch_", "psm_"))}, new
        gc.collect()
        assert not mapped_blocks(), "a collector's memory is still mapped"
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
    """Print which faults were tried (tests/faults): each was survived or has ended cleanly."""
    cases = [
        case
        for report in terminalreporter.stats.get("passed", [])
        if report.when == "call"
        for name, case in report.user_properties
        if name == "fault"
    ]
    if not cases:
        return
    terminalreporter.section("faults")
    table: dict[tuple[str, str], dict[str, int]] = {}
    for worker, fault, phase, mode in sorted(map(tuple, cases)):
        row = table.setdefault((worker, phase), {})
        row[f"{fault} ({mode})"] = row.get(f"{fault} ({mode})", 0) + 1
    for (worker, phase), row in table.items():
        terminalreporter.write_line(f"{worker}, {phase}: {', '.join(row)}")
    survived = sum(case[3] == "restart" for case in cases)
    failed = {
        report.nodeid
        for kind in ("failed", "error")  # an error is what was left behind
        for report in terminalreporter.stats.get(kind, [])
        if "tests/faults/" in report.nodeid
    }
    terminalreporter.write_line(
        f"{survived} cases survived with replacement, {len(cases) - survived} ended cleanly, "
        f"{len(failed)} failed"
    )
