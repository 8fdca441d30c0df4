"""Ending what the environments of a worker have started, and not ended."""

from __future__ import annotations

import contextlib
import os
import signal

from torchrl_hts._processes.linux import group_members, read_system_file

__all__ = ["end_group"]


def end_group(leader: int) -> None:
    """End all processes of a group by SIGKILL, but for those that tidy up after the others.

    Such a one is the resource tracker of Python's multiprocessing. `AsyncVectorEnv` has one where
    it spawns its processes. It removes their semaphores from /dev/shm once they are gone, and then
    ends by itself.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, 0)  # mostly there is nobody left
        if (members := group_members(leader)) is None:
            os.killpg(leader, signal.SIGKILL)
            return
        ended: set[int] = set()
        while left := {pid for pid in members - ended if not _tidies_up(pid)}:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            ended |= left
            members = group_members(leader) or set()  # and those that were started meanwhile


def _tidies_up(pid: int) -> bool:
    try:
        return "resource_tracker" in read_system_file(f"/proc/{pid}/cmdline")
    except OSError:  # it has ended
        return False
