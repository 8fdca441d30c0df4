"""What kinds of processes take of the cores."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from _processes import descendants

__all__ = ["used_s"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def used_s(workers: Mapping[str, int]) -> dict[str, float]:
    """Seconds of processor time that each kind of process has used up to now.

    Args:
        workers: process ids by names such as ``"executor 0"``, whose first word is the kind. This
            process is the ``"learner"``; what else it has started is a ``"server"``.
    """
    kinds = {pid: name.split()[0] for name, pid in workers.items()} | {os.getpid(): "learner"}
    found: dict[str, float] = defaultdict(float)
    for pid in descendants(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[kinds.get(pid, "server")] += (int(words[11]) + int(words[12])) * _TICK_S
    return dict(found)
