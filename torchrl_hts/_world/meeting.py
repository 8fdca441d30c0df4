"""How the ranks of a run tell each other from those of an earlier start, in a store that both know.

torchrun's own store outlives a restart, and with it the addresses of ranks that have ended. Whoever
reads one of them can't connect. So the ranks of each start agree on a name first, below which they
keep what they have to say.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Protocol

from torchrl_hts.errors import WorldError

__all__ = ["meet"]

_POLL_EVERY_S = 0.02


class Store(Protocol):
    """As much of `torch.distributed.Store` as is needed."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def meet(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """A name that the ranks of this start share, and no ranks of another.

    Each rank calls itself by a word that nobody has used. It says which words it has read of all,
    and goes on when all say the same. Since its own word is among them, none of the others can be
    one of an earlier start.

    Args:
        store: that all ranks reach.
        timeout_s: how long to wait for the others.

    Raises:
        WorldError: names the ranks that don't come; or if there is a second one of this rank.
    """
    words, views = ([f"torchrl_hts/{what}/{r}" for r in range(size)] for what in ("is", "sees"))
    own = uuid.uuid4().hex
    store.set(words[rank], own)
    said = ""
    end = time.monotonic() + timeout_s
    while True:
        view = hashlib.sha256(b" ".join(_read(store, word) for word in words)).hexdigest()
        if view != said:
            store.set(views[rank], view)
            said = view
        others = [r for r in range(size) if _read(store, views[r]) != view.encode()]
        if not others:
            return view
        if _read(store, words[rank]) != own.encode():
            raise WorldError(
                f"another process calls itself rank {rank} at the same address: give each run an "
                "address or a port of its own (torchrun --standalone, or MASTER_PORT)"
            )
        if time.monotonic() > end:
            raise WorldError(
                f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} did not come to the "
                f"start of the run within timeout_s={timeout_s:g} (this is rank {rank} of {size})"
            )
        time.sleep(_POLL_EVERY_S)


def _read(store: Store, key: str) -> bytes:
    """What is there; nothing if there is nothing, without waiting for it."""
    return store.get(key) if store.check([key]) else b""
