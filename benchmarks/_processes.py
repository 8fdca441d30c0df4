"""A process and all that it has started."""

from __future__ import annotations

from pathlib import Path

__all__ = ["descendants", "memory_mib"]


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
    kib = 0
    for each in descendants(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024
