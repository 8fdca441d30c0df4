"""Disks that fill up, by the limit of the system for the files of this process."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator

__all__ = ["full_disk"]


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes; a write beyond fails.

    Not for longer than needed: pytest may write its own lines into a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
