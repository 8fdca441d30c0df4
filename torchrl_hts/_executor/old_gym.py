"""Environments of the old gym, which ``reset`` and ``step`` in another way: told apart and named.

Knows nothing of torch.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from torchrl_hts.errors import InvalidValueError

__all__ = ["REMEDY", "checked_reset", "is_old_gym", "of_done", "of_reset", "of_step"]

REMEDY = "It has the API of the old gym: wrap it as docs/how_to/old_gym.md shows"

_OLD_STEP = "not enough values to unpack (expected 5, got 4)"
_RESET_ARGUMENT = "got an unexpected keyword argument 'seed'"
_INSIDE = " (or a call inside it)"  # of a wrapper's, or of something else that has the same words


def is_old_gym(env: object) -> bool:
    """Whether something is an environment of the package gym, not of gymnasium."""
    return any(cls.__module__.split(".")[0] == "gym" for cls in type(env).__mro__)


def of_reset(error: TypeError) -> InvalidValueError | None:
    """What an error of ``reset(seed=...)`` is to be told as; None if it is none of these.

    Args:
        error: as it was caught by the function that has this call.
    """
    if _RESET_ARGUMENT not in str(error):
        return None
    inside = "" if _is_raised_here(error) else _INSIDE
    return InvalidValueError(
        f"the environment's reset{inside} takes no seed: {error}. {REMEDY}, or add the arguments "
        "of gymnasium's, reset(self, *, seed=None, options=None), to it and to its wrappers"
    )


def checked_reset(outcome: Any) -> Any:
    """The observation that ``reset`` returned.

    Raises:
        InvalidValueError: if it did not return an observation and infos.
    """
    if not isinstance(outcome, tuple | list) or len(outcome) != 2:
        raise InvalidValueError(
            f"the environment's reset returned {reprlib.repr(outcome)}; expected two values, "
            f"(observation, info). {REMEDY}"
        )
    observation, info = outcome
    if info is not None and not isinstance(info, Mapping):
        raise InvalidValueError(
            f"the environment's reset returned {reprlib.repr(info)} as the second of its values; "
            f"expected (observation, info), where info is a dict. {REMEDY}"
        )
    return observation


def of_step(error: Exception) -> InvalidValueError | None:
    """What an error of ``_, _, _, _, _ = env.step(action)`` is to be told as, or None.

    Args:
        error: as it was caught by the function that has this line: its traceback tells whether
            the line or the environment raised it.
    """
    here = _is_raised_here(error)
    if _OLD_STEP in str(error):
        return InvalidValueError(
            f"the environment's step{'' if here else _INSIDE} returned 4 values; expected 5: "
            f"observation, reward, terminated, truncated, info. {REMEDY}"
        )
    if here and "unpack" in str(error):
        return InvalidValueError(
            "the environment's step did not return 5 values (observation, reward, terminated, "
            f"truncated, info): {error}"
        )
    return None


def _is_raised_here(error: BaseException) -> bool:
    """Whether the function that has caught it has raised it, and no call of that."""
    trace = error.__traceback__
    return trace is not None and trace.tb_next is None


def of_done(terminated: Any, truncated: Any) -> InvalidValueError:
    """The error of flags that are neither true nor false."""
    return InvalidValueError(
        f"the environment returned terminated={reprlib.repr(terminated)} and "
        f"truncated={reprlib.repr(truncated)}; expected a bool each, of one environment"
    )
