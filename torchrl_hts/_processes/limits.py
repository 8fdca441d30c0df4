"""What the system gives: looked at before anything is started, so that the message can say enough.

Processes are not counted beforehand, since no system tells what is left of them: a server says it
when it is refused one (`fork_server.py`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys

from torchrl_hts._processes.linux import allowed_cores, read_system_file
from torchrl_hts.errors import ResourceError

__all__ = [
    "available_cores",
    "available_memory",
    "check_descriptors",
    "check_storage",
    "most_executors",
    "no_room",
]

# Of the main process: sockets of two servers, the block of memory, two inboxes, and some to spare.
_OTHER_DESCRIPTORS = 16
# Each worker: its connection, its pidfd, and for a moment the other end of the connection.
_PER_WORKER = 2
_PER_INBOX = 2

# Of a container, in the second and the first version: limit, usage, and what of it is a cache that
# gives way.
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def check_descriptors(num_executors: int, num_actors: int) -> None:
    """Raise ResourceError if this process may not open as many files as its workers need."""
    if num_executors > (most := most_executors(num_actors)):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = _open_descriptors()
        needed = limit + (num_executors - most) * (_PER_WORKER + _PER_INBOX)
        raise ResourceError(
            f"{num_executors} executors and {num_actors} actors need {needed} file descriptors, "
            f"with the {used} that are open, and this process may have {limit}: allow more "
            f"(ulimit -n {needed}), or use fewer num_executors or num_actors"
        )


def most_executors(num_actors: int) -> int:
    """How many executors this process may open the files of, beside so many actors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    free = limit - _open_descriptors() - _OTHER_DESCRIPTORS - num_actors * _PER_WORKER
    return free // (_PER_WORKER + _PER_INBOX)


def check_storage(num_bytes: int, storage_dir: str | None, of_timeline: int = 0) -> None:
    """Raise ResourceError if there is no room for the slots.

    Args:
        num_bytes: their size.
        storage_dir: the directory that they are to lie in; None for memory.
        of_timeline: how many of the bytes are for the events of a timeline.
    """
    if storage_dir is not None:
        free = os.statvfs(storage_dir)
        available: int | None = free.f_bavail * free.f_frsize
        where = f"the free space of storage_dir={storage_dir!r}"
    else:
        available = available_memory()
        where = "the memory that is available"
    if available is not None and num_bytes > available:
        why = f"and {where} is {_size(available)}"
        raise no_room(num_bytes, of_timeline, why, in_memory=storage_dir is None)


def no_room(num_bytes: int, of_timeline: int, why: str, *, in_memory: bool) -> ResourceError:
    """The error that slots of this size can't be had: who needs it, why not, and what to do.

    Args:
        num_bytes, of_timeline: see `check_storage`.
        why: what goes on from "the rounds need 3 GiB, ".
        in_memory: whether they are to lie in memory, not in a file.
    """
    if of_timeline > num_bytes // 2:
        what, remedy = "the timeline needs", "ask for fewer timeline_events"
    else:
        what = "the rounds need"
        place = "hold the rounds in a file" if in_memory else "hold them where there is more room"
        remedy = (
            f"{place} with storage_dir, or make them smaller (frames_per_batch, lag, "
            "compact_obs=True, uint8 observations)"
        )
    return ResourceError(f"{what} {_size(num_bytes)}, {why}: {remedy}")


def available_cores() -> float:
    """The number of cores that this process may use; in a container with a quota, part of one."""
    quotas = []
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        most, period = read_system_file("/sys/fs/cgroup/cpu.max").split()
        quotas.append(int(most) / int(period))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        names = ("cfs_quota_us", "cfs_period_us")
        most_us, period_us = (
            int(read_system_file(f"/sys/fs/cgroup/cpu/cpu.{name}")) for name in names
        )
        if most_us > 0:  # -1: no limit
            quotas.append(most_us / period_us)
    return min([float(allowed_cores()), *quotas])


def available_memory() -> int | None:
    """Bytes that this process may still allocate, as far as the system says; else None."""
    found = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        found.append(_fields("/proc/meminfo")["MemAvailable:"] * 1024)
    for directory, limit, usage, cache in _CGROUPS:
        with contextlib.suppress(OSError, KeyError, ValueError):  # none here, or "max"
            most, used = (int(read_system_file(f"{directory}/{name}")) for name in (limit, usage))
            found.append(most - used + _fields(f"{directory}/memory.stat")[cache])
    return max(0, min(found)) if found else None


def _fields(path: str) -> dict[str, int]:
    """The lines of a file, each a name and a number."""
    lines = (line.split() for line in read_system_file(path).splitlines())
    return {words[0]: int(words[1]) for words in lines}


def _open_descriptors() -> int:
    return len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0


def _size(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"
