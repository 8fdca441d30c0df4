"""Steps that environments of an executor play in the background, and finish in any order."""

from __future__ import annotations

import select
from array import array
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from torchrl_hts._rounds.exchange import Inbox

if TYPE_CHECKING:
    from torchrl_hts._executor.gym_env import GymEnvironment

__all__ = ["BackgroundSteps"]


class BackgroundSteps:
    """Steps whose environments tell when they are over.

    An environment tells by a word in a pipe of this process alone. It may do so in any thread.

    Args:
        inbox: of the executor, to which more actions come meanwhile.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._over = Inbox.create()
        self._began: dict[int, int] = {}  # when, by environment; the oldest first
        self._poll = select.poll()
        for each in (inbox, self._over):
            self._poll.register(each.read_fd, select.POLLIN)

    def __len__(self) -> int:
        return len(self._began)

    @property
    def oldest(self) -> int:
        """The environment whose step has begun first of those that aren't over."""
        return next(iter(self._began))

    def watch(self, env: int, environment: GymEnvironment, began: int) -> None:
        """Note a step that has begun; the environment is to tell when it is over."""
        self._began[env] = began
        environment.tell_when_over(partial(self._over.post, (env,)))

    def read(self) -> array[int]:
        """Sleep until a step is over or there is something in the inbox; returns what is there.

        Raises:
            EOFError: if every writer of the inbox is gone.
        """
        self._poll.poll()
        return self._inbox.read() if self._inbox.is_ready() else array("H")

    def over(self) -> Iterator[tuple[int, int]]:
        """Yield the environments whose steps are over, and when these began; doesn't wait."""
        for env in self._over.read_ready():
            yield env, self._began.pop(env)

    def close(self) -> None:
        """Close the pipe; only once all steps are over, for the others would write elsewhere."""
        self._over.close()
