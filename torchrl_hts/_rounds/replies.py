"""What executors and actors alike say to the main process, over their control connections.

What only one of them is told, or says, lies in ``_executor/messages.py`` and
``_actor/messages.py``. Nothing of it is said while a run goes on: only when it starts, comes to
rest, is saved or fails. Meanwhile indices go through inboxes (``exchange.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_hts._processes.raised import Raised

__all__ = ["Failed", "Stopped"]


@dataclass(frozen=True)
class Stopped:
    """From an executor or an actor, each time that it has come to rest after a STOP."""


@dataclass(frozen=True)
class Failed:
    """From an executor or an actor, before it ends: an environment, or the policy, has raised.

    Attributes:
        raised: how.
        env_indices: the environment, or those of the policy's batch, among this learner's.
        round: that it was at; None while an environment was made.
        step: that an environment was at, within the round; None otherwise.
    """

    raised: Raised
    env_indices: tuple[int, ...]
    round: int | None = None
    step: int | None = None
