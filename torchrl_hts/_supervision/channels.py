"""What the processes of one collector share by descriptors: a block of memory, and inboxes."""

from __future__ import annotations

import contextlib
import os

from torchrl_hts._rounds.exchange import Inbox
from torchrl_hts._rounds.shared_memory import SharedMemory

__all__ = ["Channels"]


class Channels:
    """Descriptors of the memory and the inboxes, open at both ends in the main process.

    Args:
        num_executors: who have an inbox each; the actors have one together.
        storage_dir: a directory for the memory; None for the system's own.

    Attributes:
        memory_fd: of the block of memory, still without a size; -1 when it is closed.
        executors: an inbox for each executor.
        actors: the inbox of all actors.
        learner: the learner's inbox.
    """

    def __init__(self, num_executors: int, storage_dir: str | None) -> None:
        self.executors: list[Inbox] = []
        with contextlib.ExitStack() as opened:
            self.memory_fd = SharedMemory.create_fd(storage_dir)
            opened.callback(os.close, self.memory_fd)
            self.actors = Inbox.create()
            opened.callback(self.actors.close)
            self.learner = Inbox.create()
            opened.callback(self.learner.close)
            for _ in range(num_executors):
                self.executors.append(Inbox.create())
                opened.callback(self.executors[-1].close)
            opened.pop_all()

    @property
    def inboxes(self) -> list[Inbox]:
        """All of them."""
        return [*self.executors, self.actors, self.learner]

    def fds_of_executor(self, index: int) -> list[int]:
        """What an executor is handed, in the order in which `run_executor` takes it."""
        return [
            self.memory_fd,
            self.executors[index].read_fd,
            self.actors.write_fd,
            self.learner.write_fd,
        ]

    def fds_of_actor(self) -> list[int]:
        """What an actor is handed, in the order in which `run_actor` takes it."""
        return [
            self.memory_fd,
            self.actors.read_fd,
            self.actors.write_fd,
            *(inbox.write_fd for inbox in self.executors),
        ]

    def close(self) -> None:
        """Close all that is open here; may be called again."""
        for inbox in self.inboxes:
            inbox.close()
        memory_fd, self.memory_fd = self.memory_fd, -1
        if memory_fd >= 0:
            os.close(memory_fd)
