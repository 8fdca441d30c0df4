"""States with a seal, by which it is seen that they are whole and what they are of."""

from __future__ import annotations

import hashlib

__all__ = ["opened", "sealed"]


def sealed(kind: bytes, body: bytes) -> bytes:
    """A state of a kind."""
    return kind + hashlib.sha256(body).digest() + body


def opened(kind: bytes, state: bytes, giver: str) -> bytes:
    """What is in a state.

    Args:
        kind: that it must be of.
        state: from `sealed`.
        giver: what returns such states, for people.

    Raises:
        TypeError: if it is no bytes.
        ValueError: if it is damaged, or of another kind.
    """
    if not isinstance(state, bytes):
        raise TypeError(
            f"the environment's state must be bytes, as {giver} returned it, got "
            f"{type(state).__name__}"
        )
    start = len(kind) + hashlib.sha256().digest_size
    body = state[start:]
    if state[:start] != kind + hashlib.sha256(body).digest():
        raise ValueError(
            f"the environment's state ({len(state)} bytes) is damaged, of another version of "
            f"torchrl_hts, or of another kind of environment: it must be what {giver} returned, "
            "unchanged"
        )
    return body
