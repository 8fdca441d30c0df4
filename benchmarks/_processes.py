"""A process and all that it has started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["descendants", "held_mib", "kinds_of", "memory_mib"]


def kinds_of(workers: Mapping[str, int]) -> dict[int, str]:
    """The kind of each process here; what isn't named is a server.

    Args:
        workers: process ids by names such as ``"executor 0"``, whose first word is the kind.
    """
    named = {pid: name.split()[0] for name, pid in workers.items()} | {os.getpid(): "learner"}
    return {pid: named.get(pid, "server") for pid in descendants(os.getpid())}


def descendants(pid: int) -> list[int]:
    """A process and all that descend from it; empty if it has ended."""
    found, next_ones = [], [pid]
    while next_ones:
        parent = next_ones.pop()
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
            children = [(task / "children").read_text().split() for task in tasks]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append(parent)
        next_ones += [int(child) for each in children for child in each]
    return found


def memory_mib(pid: int) -> float:
    """What a process and all that descend from it take; pages that they share are counted once."""
    return sum(held_mib(each).get("Pss", 0.0) for each in descendants(pid))


def held_mib(pid: int) -> dict[str, float]:
    """What one process holds, by the names of /proc's smaps_rollup; empty if it has ended."""
    try:
        _, *lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {name.rstrip(":"): int(kib) / 1024 for name, kib, *_ in words}
