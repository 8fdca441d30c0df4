"""What a process does to itself at a certain moment, so that no test has to wait for it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple


class Deed(NamedTuple):
    """What a rank, or a process alone, does to itself at a certain moment.

    Attributes:
        number: the signal that it sends itself; 0: it raises a ValueError.
        rank: which one does.
        where: before which method, such as ``"support.run:Run.record"``.
        count: at which call of it.
    """

    number: int
    rank: int
    where: str
    count: int

    def prepare(self) -> None:
        """Have it done, if this is the rank."""
        if int(os.environ.get("RANK", "0")) != self.rank:
            return
        module, _, path = self.where.partition(":")
        owner, name = path.split(".")
        kind = getattr(importlib.import_module(module), owner)
        does: Callable[..., Any] = getattr(kind, name)
        calls = 0

        def deed(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.count:
                if not self.number:
                    raise ValueError(f"{path} has failed")
                os.kill(os.getpid(), self.number)
            return does(*args, **kwargs)

        setattr(kind, name, deed)
