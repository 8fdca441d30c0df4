"""Waiting and waking: the shell around the schedule.

Every worker has an inbox, a pipe that carries 16-bit words: the indices of environments, or one of
the codes below. The data itself lies in the slots. A pipe is all that is needed. A read sleeps
without using the processor until something comes, and then takes everything that has come. A write
of a few bytes is atomic. Several actors may read one inbox. And the kernel orders what was written
to shared memory before a message with what is read from it after.

    executors --(observation of i is in its row)--> actors' common inbox
    actors    --(action of i is in its row)-------> inbox of the executor that owns i
    executors --(i has finished a round)----------> learner's inbox
    learner   --(WAKE: a round was opened)--------> inbox of an executor with a parked environment
    learner   --(SAVE, while all are parked)------> inboxes of all executors

Finishing and WAKE close the only race of the schedule, without a lock. An executor parks an
environment only if it has first told the learner and then found the next round not open. The
learner first opens the round and then takes what is in its inbox. Whichever is second sees what the
first has done: either the executor finds the round open, or the learner finds the message and wakes
it. An environment that goes on needs no waking, and the learner nothing of its round before the
last environment has finished that: so it hears of many in one message.

A worker that fails may take words along that it has read, and leave others unsaid. Therefore after
a failure everybody comes to rest, the inboxes are emptied, and the words that belong into them are
found again from the schedule (`LearnerPort.restore_messages`). For that the learner's process keeps
every inbox open at both ends, which also spares others an error when they write to one that has
failed.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from array import array
from collections.abc import Collection, Iterable, Sequence

from torchrl_hts._rounds.schedule import Phase, Schedule

__all__ = [
    "MAX_ENVS",
    "MAX_PENDING",
    "SAVE",
    "STOP",
    "WAKE",
    "ExecutorPort",
    "Inbox",
    "LearnerPort",
]

WAKE = 0xFFFF  # to an executor: a round was opened, look whether your parked ones may go on
STOP = 0xFFFE  # to a worker: come to rest and listen to the control connection
SAVE = 0xFFFD  # to an executor whose environments are parked: say how each of them is
MAX_ENVS = 2048  # as many words as one write keeps together
MAX_PENDING = 30_000  # as many as an inbox takes without making the writer wait, and some room

_READ_BYTES = 1 << 16  # as much as a pipe holds


class Inbox:
    """A pipe of 16-bit words.

    Args:
        read_fd: the end that its owner reads, or -1 on a side that only writes.
        write_fd: the end that others write to, or -1 on a side that only reads.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._poll = select.poll()  # unlike select(), for any number of descriptors
        if read_fd >= 0:
            self._poll.register(read_fd, select.POLLIN)

    @classmethod
    def create(cls) -> Inbox:
        """Make a new pipe."""
        return cls(*os.pipe())

    def post(self, words: Iterable[int]) -> None:
        """Append words; the reader wakes up.

        Never blocks: no more than one for each environment and slot are pending, `MAX_PENDING`.
        """
        data = array("H", words).tobytes()
        os.write(self.write_fd, data)

    def is_ready(self, timeout_ms: int = 0) -> bool:
        """Whether there is something to read, or will be within the time-out."""
        return bool(self._poll.poll(timeout_ms))

    def read(self, look_ns: int = 0) -> array[int]:
        """Sleep until there is something, and return all that there is, in order of arrival.

        Args:
            look_ns: for how long to look for something, awake, before going to sleep.

        Raises:
            EOFError: if every writer is gone.
        """
        if look_ns:
            clock, poll = time.perf_counter_ns, self._poll.poll
            deadline = clock() + look_ns
            while not poll(0) and clock() < deadline:
                pass
        words = os.read(self.read_fd, _READ_BYTES)
        if not words:
            raise EOFError("nobody is left to write to this inbox")
        return array("H", words)

    def read_ready(self) -> array[int]:
        """Return what there is, without waiting."""
        words: array[int] = array("H")
        with contextlib.suppress(EOFError):
            while self.is_ready():
                words.extend(self.read())
        return words

    def close(self) -> None:
        """Close the ends that this side has; may be called again."""
        fds, self.read_fd, self.write_fd = (self.read_fd, self.write_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


class ExecutorPort:
    """An executor's side: passes its environments on, and parks those whose round isn't open.

    Args:
        schedule: the schedule, over shared words.
        actors: the actors' common inbox.
        learner: the learner's inbox.
        envs: the executor's environments.
    """

    def __init__(
        self, schedule: Schedule, actors: Inbox, learner: Inbox, envs: Collection[int]
    ) -> None:
        self.schedule = schedule
        self.actors = actors
        self.learner = learner
        self.parked: set[int] = set()
        self._to_announce: list[int] = []
        self._finished: list[int] = []
        self.envs = envs
        self._behind: dict[int, int] = {}  # how many have not finished a round that others have

    def go_on_or_park(self, env: int) -> bool:
        """Whether ``env``, which is between two steps, may go on; it is parked if not.

        Returns True if the caller is to write its observation and then call `pass_on`.
        """
        if self.schedule.is_open(self.schedule.position(env)[0]):  # I4
            self.parked.discard(env)
            return True
        self.parked.add(env)
        return False

    def pass_on(self, env: int) -> None:
        """The observation of ``env`` is written; actors hear of it at the next `flush`."""
        self.schedule.offer(env)
        self._to_announce.append(env)

    def finish_step(self, env: int) -> bool:
        """The transition of ``env`` is written; returns whether it may go on; it is parked if not.

        The learner hears of a finished round at once if no other of the environments is behind, or
        if ``env`` can't go on. Otherwise it hears at the next `flush`, since it has to wait for
        others anyway.
        """
        if not self.schedule.finish_step(env):
            return True
        self._finished.append(env)
        round_ = self.schedule.position(env)[0]
        if not self._is_last(round_ - 1) and self.schedule.is_open(round_):
            return True
        self._tell_learner()  # before looking again
        return self.go_on_or_park(env)

    def _is_last(self, round_: int) -> bool:
        """Whether the environment that has finished a round now is the last to do so."""
        behind = self._behind.pop(round_, None)
        if behind is None:
            behind = sum(self.schedule.position(env)[0] <= round_ for env in self.envs)
        else:
            behind -= 1
        if behind:
            self._behind[round_] = behind
        return not behind

    @property
    def num_unannounced(self) -> int:
        """How many environments were passed on since the last `flush`."""
        return len(self._to_announce)

    def flush(self) -> None:
        """Tell the actors of everything passed on since the last time, in one message.

        And the learner of the rounds of which it has not heard yet.
        """
        if self._to_announce:
            self.actors.post(self._to_announce)
            self._to_announce.clear()
        self._tell_learner()

    def _tell_learner(self) -> None:
        """Tell the learner of all rounds that were finished since the last time."""
        if self._finished:
            self.learner.post(self._finished)
            self._finished.clear()


class LearnerPort:
    """The learner's side: knows which environments have finished, opens rounds, wakes executors.

    Args:
        schedule: the schedule, over shared words.
        inbox: the learner's inbox.
        executors: one inbox per executor.
        owner: for each environment, the index of its executor.
    """

    def __init__(
        self,
        schedule: Schedule,
        inbox: Inbox,
        executors: Sequence[Inbox],
        owner: Sequence[int],
    ) -> None:
        self.schedule = schedule
        self.inbox = inbox
        self.executors = executors
        self.owner = owner
        self.count_anew()

    def count_anew(self, ahead: int = 0) -> None:
        """Start counting as the schedule was restarted; everybody else is at rest."""
        self._finished_rounds = [self.schedule.lent + ahead] * len(self.owner)

    def restore_messages(self, lost: Iterable[int], actors: Inbox) -> None:
        """Make good what failed workers held, or had not said any more.

        They have ended, and everybody else is at rest. So nobody writes to any inbox, and what
        should be in them follows from the words alone; executors see to those that are IDLE.

        Args:
            lost: the environments whose executors have failed.
            actors: the actors' common inbox.
        """
        for inbox in (self.inbox, actors, *self.executors):
            inbox.read_ready()
        schedule = self.schedule
        schedule.recover(lost)
        for env, executor in enumerate(self.owner):
            self._finished_rounds[env] = schedule.position(env)[0]
            if schedule.phase[env] == Phase.READY:
                actors.post([env])
            elif schedule.phase[env] == Phase.ANSWERED:
                self.executors[executor].post([env])

    def hear(self) -> None:
        """Take in what the executors have said, without waiting."""
        for env in self.inbox.read_ready():
            self._finished_rounds[env] += 1

    def has_heard_all(self, round_: int) -> bool:
        """Whether every executor has said that its environments have finished the round."""
        return min(self._finished_rounds) > round_

    def open_next_round(self) -> None:
        """The update of the lent round is done and its slot holds the new parameters."""
        opened = self.schedule.release() + self.schedule.num_slots
        self.hear()  # after opening
        if not self.schedule.is_open(opened):
            return  # the last round is open already
        # Only an environment that has finished all that was open before can be parked.
        waiting = {
            self.owner[env]
            for env, rounds in enumerate(self._finished_rounds)
            if rounds == opened and self.schedule.phase[env] == Phase.IDLE
        }
        for executor in sorted(waiting):
            self.executors[executor].post([WAKE])
