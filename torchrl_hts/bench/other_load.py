"""How much of this process's cores other programs use."""

from __future__ import annotations

import time
from collections.abc import Set

from torchrl_hts._processes.limits import available_cores
from torchrl_hts._processes.linux import allowed_cores, core_numbers, read_system_file

__all__ = ["busy_share", "cores_used_by_others"]


def cores_used_by_others(seconds: float) -> float | None:
    """Of the cores that this process may use, how many others keep busy while it sleeps.

    None where the system doesn't tell; it takes Linux's /proc.
    """
    cores, mine = available_cores(), core_numbers()
    if mine is None:
        return None
    try:
        before = read_system_file("/proc/stat")
        time.sleep(seconds)
        used = busy_share(before, read_system_file("/proc/stat"), mine) * len(mine)
    except OSError:
        return None
    # Under a quota on processor time others may have the rest of the machine.
    return min(cores, max(0.0, used - (allowed_cores() - cores)))


def busy_share(before: str, after: str, cores: Set[int]) -> float:
    """Which part of the time between two readings of /proc/stat some cores were busy.

    Time that the host of a virtual machine took counts as busy.

    Args:
        before, after: its contents.
        cores: their numbers.

    Example:
        >>> before, after = "cpu0 100 0 0 900 0 0 0 0", "cpu0 175 0 0 925 0 0 0 0"
        >>> busy_share(before, after, {0})
        0.75
    """
    total = idle = 0
    for text, sign in ((before, -1), (after, 1)):
        for line in text.splitlines():
            name, *words = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
                ticks = [int(word) for word in words[:8]]  # guests are in user time already
                total += sign * sum(ticks)
                idle += sign * (ticks[3] + ticks[4])  # nothing to do; waiting for a disk
    return 1 - idle / total if total > 0 else 0.0
