"""What kinds of processes take of the cores."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from _processes import kinds_of

__all__ = ["used_s"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def used_s(workers: Mapping[str, int]) -> dict[str, float]:
    """Seconds of processor time that each kind of process has used up to now.

    Args:
        workers: see `kinds_of`.
    """
    found: dict[str, float] = defaultdict(float)
    for pid, kind in kinds_of(workers).items():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[kind] += (int(words[11]) + int(words[12])) * _TICK_S
    return dict(found)
