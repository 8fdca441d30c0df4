"""What any process of a server says before it ends by an exception."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from torchrl_hts.errors import (
    CannotSaveError,
    EnvError,
    Failure,
    InvalidValueError,
    PolicyError,
    failure_of,
)

__all__ = ["Raised"]


_SAY_ALL = (CannotSaveError, EnvError, InvalidValueError, PolicyError)


@dataclass(frozen=True)
class Raised:
    """From any worker, before it ends: what ran in it has raised.

    Attributes:
        failure: how it failed.
        traceback: of the exception, as text. Where this package has found the fault, and nothing
            else had raised before, it is the last line alone: that one says all.
    """

    failure: Failure
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """How an exception is told of."""
        if isinstance(error, _SAY_ALL) and error.__cause__ is None:
            lines = [f"{type(error).__name__}: {error}\n"]
        else:
            lines = traceback.format_exception(error)
        return cls(failure_of(error), "".join(lines))
