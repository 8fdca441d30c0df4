"""Environments that can play while the process that asked for it does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym

__all__ = ["BackgroundEnv", "overlaps"]


class BackgroundEnv(gym.Env[Any, Any]):
    """An environment that can play while the process that asked for it does something else.

    `reset` and `step` give the same whether or not they have been begun. What has been begun comes
    next.

    Attributes:
        tells: whether it calls what `tell_when_over` gets. Else steps are waited for in the order
            in which they began.
        begins_episodes: whether it tells, and an episode that follows on another is to be begun by
            ``begin_reset(None)`` too, for it may take as long as a step.
        held: the environment of this process that it plays, if there is one.
    """

    tells = False
    begins_episodes = False
    held: gym.Env[Any, Any] | None = None

    def begin_reset(self, seed: int | None) -> bool:
        """Begin a `reset` with this seed, which comes next, or get ready for it.

        Returns True if its end is to be waited for by `tell_when_over`; else `reset` waits for it.
        """
        return False

    def begin_step(self, action: Any) -> bool:
        """Begin a `step` with this action, which comes next and waits for it.

        Returns False if `step` is to do it all.
        """
        return False

    def tell_when_over(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called, by any thread, once the step or reset that has begun is over."""

    def begin_close(self) -> None:
        """Get ready for a `close`, which comes next."""


def overlaps(env: object) -> bool:
    """Whether an executor has steps of several such environments under way at the same time."""
    return isinstance(env, BackgroundEnv) and env.tells
