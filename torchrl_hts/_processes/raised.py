"""What any process of a server says before it ends by an exception."""

from __future__ import annotations

import pickle
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

__all__ = ["Raised", "exits_well"]


_SAY_ALL = (CannotSaveError, EnvError, InvalidValueError, PolicyError)


@dataclass(frozen=True)
class Raised:
    """From any worker, before it ends: what ran in it has raised.

    Attributes:
        failure: how it failed.
        traceback: of the exception, as text, and what to do, where that is known. Where this
            package has found the fault, and nothing else had raised before, it is the last line
            alone: that one says all.
    """

    failure: Failure
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """How an exception is told of."""
        if isinstance(error, _SAY_ALL) and error.__cause__ is None:
            lines = [f"{type(error).__name__}: {error}\n"]
        else:
            lines = [*traceback.format_exception(error), _on_script(error)]
        return cls(failure_of(error), "".join(lines))


def exits_well(error: BaseException | None) -> bool:
    """Whether it is what ``sys.exit()`` raises to say that all is well."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _on_script(error: BaseException) -> str:
    """What to do where something of the main script was to be found by its name in a worker."""
    if isinstance(error, pickle.PicklingError | AttributeError) and "__main__" in str(error):
        return (
            "What a script defines comes to a worker by value, and has no name there by which it "
            "could be pickled: put it into a module of its own, and import it in the script "
            "(docs/explanation/inheritance.md)\n"
        )
    return ""
