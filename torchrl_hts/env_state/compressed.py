"""States of environments as they are kept: compressed."""

from __future__ import annotations

import zlib

__all__ = ["compressed", "decompressed"]


def compressed(state: bytes) -> bytes:
    """A state in fewer bytes."""
    return zlib.compress(state, 1)


def decompressed(state: bytes) -> bytes:
    """What was compressed.

    Raises:
        ValueError: if it is damaged, or something else.
    """
    try:
        return zlib.decompress(state)
    except zlib.error as error:
        raise ValueError(
            f"the environment's state ({len(state)} bytes) is damaged, or that of a batch of "
            f"environments: {error}"
        ) from error
