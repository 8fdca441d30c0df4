"""What any process of a server says before it ends by an exception."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from torchrl_hts.errors import Failure, failure_of

__all__ = ["Raised"]


@dataclass(frozen=True)
class Raised:
    """From any worker, before it ends: what ran in it has raised.

    Attributes:
        failure: how it failed.
        traceback: of the exception, as text.
    """

    failure: Failure
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """How an exception is told of."""
        return cls(failure_of(error), "".join(traceback.format_exception(error)))
