"""What Linux offers beyond POSIX. Elsewhere everything works without it, with fewer assurances.

No other module asks for any of it. With ``TORCHRL_HTS_POSIX_ONLY=1`` in the environment Linux is
treated as another system, so that tests can show that nothing depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

__all__ = [
    "ON_LINUX",
    "allowed_cores",
    "anonymous_memory",
    "core_numbers",
    "die_with_parent",
    "give_back_memory",
    "group_members",
    "is_anonymous_memory",
    "keep_blocks_of_workers",
    "keep_large_blocks",
    "name_process",
    "read_system_file",
    "wake_on_time",
    "watch_end",
]

ON_LINUX = sys.platform == "linux" and not os.environ.get("TORCHRL_HTS_POSIX_ONLY")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_OLD_LIMIT = 1 << 25  # the largest threshold that an old glibc takes
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29


def anonymous_memory(name: str) -> int | None:
    """A descriptor of memory without a place in the file system; None: take a file."""
    if not (ON_LINUX and hasattr(os, "memfd_create")):
        return None
    fd = os.memfd_create(name)
    os.fchmod(fd, 0o600)  # as that of a temporary file: Linux begins with all rights for all
    return fd


def is_anonymous_memory(fd: int) -> bool:
    """Whether a descriptor is one of `anonymous_memory`."""
    try:
        return ON_LINUX and os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
    except OSError:
        return False


def watch_end(pid: int) -> int | None:
    """A descriptor that becomes readable when a process ends.

    Needed where a fork of the main process outlives it and keeps our socket open; elsewhere than
    on Linux the end of the socket has to do.
    """
    try:
        return os.pidfd_open(pid) if ON_LINUX else None
    except (AttributeError, OSError):
        return None


def die_with_parent(parent_pid: int) -> None:
    """Let this process be killed as soon as its parent ends, however that ends."""
    if ON_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before prctl
            os._exit(1)


def name_process(name: str) -> None:
    """Let `top` and `ps` (its comm) show this process under a name; Linux keeps 15 bytes."""
    if ON_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def keep_large_blocks(max_bytes: int = 1 << 30) -> bool:
    """Let this process keep memory that it has freed for what it allocates next.

    glibc gives large blocks back to the system as soon as they are free. A learner allocates the
    same ones for every batch: activations, gradients, pictures as floats. The system then has to
    clear all those pages for each update. Call this before training, in the process that learns;
    workers keep blocks of up to 32 MiB anyway. What is computed stays the same. An old glibc
    (2.30, say) keeps blocks of up to 32 MiB alone.

    Args:
        max_bytes: larger blocks are given back at once; so is what is free at the end of the
            process's memory, where it is more than this.

    Returns:
        False where the system's C library can't do that, and nothing has changed.

    Raises:
        ValueError: if `max_bytes` is no int, less than 1, or more than a C int holds.

    Example:
        >>> from torchrl_hts import keep_large_blocks
        >>> kept = keep_large_blocks()
    """
    if not (isinstance(max_bytes, int) and 1 <= max_bytes < 1 << 31):
        raise ValueError(f"max_bytes must be an int from 1 to {(1 << 31) - 1}, got {max_bytes!r}")
    return _keep_blocks(max_bytes, max_bytes)


def keep_blocks_of_workers() -> None:
    """The same of this process and all that it forks, as suits workers.

    Kept are the blocks of a forward pass with some hundred rows: a third off 16 rows of the Nature
    CNN. Larger ones are passes of many rows, which take long beside clearing their pages. Between
    kept blocks of all sizes the gaps would add up: to 1.5 GiB of an actor for 1,024 games.
    """
    _keep_blocks(1 << 25, 1 << 28)


def _keep_blocks(largest: int, at_end: int) -> bool:
    """Have malloc keep blocks of up to so many bytes, and so many that are free at its end."""
    try:
        mallopt = ctypes.CDLL(None).mallopt if ON_LINUX else None
    except AttributeError:  # not glibc
        mallopt = None
    if mallopt is None:
        return False
    kept = any(mallopt(_M_MMAP_THRESHOLD, limit) for limit in (largest, min(largest, _OLD_LIMIT)))
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, at_end))


def give_back_memory() -> None:
    """Let the system have what this process has freed and its C library has kept.

    What a worker needs once, to start, may be more than it ever needs again.
    """
    with contextlib.suppress(AttributeError):  # not glibc
        if ON_LINUX:
            ctypes.CDLL(None).malloc_trim(0)


def wake_on_time() -> None:
    """Let this process wake up from sleep to the microsecond, not up to 50 of them later."""
    if ON_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # in nanoseconds


def allowed_cores() -> int:
    """The number of cores that this process may run on."""
    numbers = core_numbers()
    return (os.cpu_count() or 1) if numbers is None else len(numbers)


def core_numbers() -> set[int] | None:
    """Which cores this process may run on; None where the system doesn't tell."""
    if ON_LINUX and hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return None


def group_members(leader: int) -> set[int] | None:
    """The processes of a group that run; None where the system doesn't tell."""
    if not ON_LINUX:
        return None
    members = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state not in "ZX":
                members.add(int(path.parent.name))
    return members


def read_system_file(path: str) -> str:
    """What a file below /proc or /sys says; raises OSError where there is none."""
    if not ON_LINUX:
        raise FileNotFoundError(f"{path} is asked for on Linux alone")
    return Path(path).read_text()
