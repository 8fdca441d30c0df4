"""What tests of waiting and waking share: new inboxes, and an executor's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torchrl_hts._rounds.exchange import STOP, WAKE, ExecutorPort, Inbox


@contextmanager
def inboxes(count: int) -> Iterator[list[Inbox]]:
    """New inboxes, closed at the end."""
    made = [Inbox.create() for _ in range(count)]
    try:
        yield made
    finally:
        for inbox in made:
            inbox.close()


def serve_executor(
    port: ExecutorPort,
    inbox: Inbox,
    offer: Callable[[int], None],
    step: Callable[[int], bool],
    woken: Callable[[], None] = lambda: None,
) -> None:
    """An executor's loop until STOP; ``offer`` and ``step`` end with the port's own."""
    while True:
        for word in inbox.read():
            if word == STOP:
                return
            if word == WAKE:
                woken()
                for env in sorted(port.parked):
                    if port.go_on_or_park(env):
                        offer(env)
            elif step(word):
                offer(word)
        port.flush()


def envs_of(owner: Sequence[int], index: int) -> list[int]:
    """The environments of an executor."""
    return [env for env, executor in enumerate(owner) if executor == index]
