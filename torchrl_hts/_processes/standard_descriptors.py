"""Descriptors 0, 1 and 2, which a process may have been started without.

As by ``cmd <&- >&- 2>&-``, an idiom for what is to outlive its terminal. The next descriptors that
are opened then get these numbers: a connection to a worker would be what others print to.
"""

from __future__ import annotations

import os

__all__ = ["fill_standard_descriptors"]


def fill_standard_descriptors() -> None:
    """Open those of the three that are closed, as /dev/null; before anything else is opened."""
    if all(map(_is_open, range(3))):
        return
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:  # each the lowest that is free
        os.set_inheritable(fd, True)
    os.close(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
