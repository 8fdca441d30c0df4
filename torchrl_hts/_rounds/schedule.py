"""The schedule of rounds and slots: which event may happen when, in indices alone.

Vocabulary (docs/explanation/schedule.md): n environments, alpha = ``sync_interval`` steps per
environment and round, ``lag + 1`` slots, round j in slot ``j % (lag + 1)``. The state is one word
per environment and phase, and two words of the learner:

    steps[i]   transitions that environment i has completed since the start
    phase[i]   whose turn environment i is, a ``Phase``
    lent       batches handed to the learner
    released   batches whose update is done

A batch of environments that steps as a whole is one environment here: it is offered, answered and
stepped as one. How many rows of a slot it has is for others to know (`Layout.units`).

Each word has one writer at a time, so that the state can live in memory shared by processes without
a lock: ``steps[i]`` is written by the executor of i, ``lent`` and ``released`` by the learner.
``phase[i]`` is written by the executor while it is IDLE or ANSWERED, and by an actor while it is
READY or TAKEN. Whoever passes the turn on writes the words first and tells the other side
afterwards (``exchange.py``).

Workers may fail at any moment. What is in the words then says all that is needed to go on, since an
executor counts a transition when it has been written whole: `Schedule.recover`.

Invariants (numbered as in docs/explanation/schedule.md; tests/rounds/test_schedule*.py name them):

I1  every environment contributes exactly alpha transitions to every round, in time order;
I2  all transitions of round j are taken with the parameters of slot ``j % (lag + 1)``, which
    change only while that slot is closed;
I3  update j reads round j alone and makes the parameters of round j + lag + 1;
I4  round r opens when update r - (lag + 1) is done, for each environment when it has finished
    round r - 1; nothing else is waited for;
I5  a slot has one writer set at a time: executors and actors while its round is open and not
    full, the learner while its batch is lent.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol

from torchrl_hts.errors import ProtocolError

__all__ = ["Phase", "Schedule", "Words"]


class Words(Protocol):
    """A row of integers, possibly in shared memory: a list, an array or a memoryview."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Phase(IntEnum):
    """Whose turn an environment is."""

    IDLE = 0  # the executor holds it: between two steps, or waiting for its next round to open
    READY = 1  # its observation is in its row; any actor may take it
    TAKEN = 2  # an actor is computing its action
    ANSWERED = 3  # its action is in its row; its executor may step it


# Looking up a member of an enum costs more than comparing it.
_IDLE, _READY, _TAKEN, _ANSWERED = Phase


class Schedule:
    """State machine of rounds and slots over words that may be shared between processes.

    Args:
        num_envs: number of environments n.
        sync_interval: alpha, transitions per environment and round.
        lag: how many updates the behaviour parameters are behind; 0 is synchronous.
        last_round: rounds from this one on never open; None for an endless run.
        steps, phase: n words each; made here if not given.
        learner: the two words ``lent`` and ``released``; made here if not given.

    Every method raises `ProtocolError` for an event that the present state does not allow, and
    then leaves the state as it was.

    Example:
        >>> schedule = Schedule(num_envs=1, sync_interval=1, lag=0)
        >>> schedule.offer(0), schedule.take([0]), schedule.answer([0])
        (None, None, None)
        >>> schedule.finish_step(0), schedule.is_full(0), schedule.is_open(1)
        (True, True, False)
        >>> schedule.lend(), schedule.release(), schedule.is_open(1)
        (0, 0, True)
    """

    def __init__(
        self,
        num_envs: int,
        sync_interval: int,
        lag: int,
        *,
        last_round: int | None = None,
        steps: Words | None = None,
        phase: Words | None = None,
        learner: Words | None = None,
    ) -> None:
        self.num_envs = num_envs
        self.sync_interval = sync_interval
        self.lag = lag
        self.num_slots = lag + 1
        self.last_round = last_round
        self.steps: Words = [0] * num_envs if steps is None else steps
        self.phase: Words = [int(_IDLE)] * num_envs if phase is None else phase
        self.learner: Words = [0, 0] if learner is None else learner

    def restart(self, first_round: int = 0, *, lent: bool = False, ahead: int = 0) -> None:
        """Put every word to where round ``first_round`` is lent next; nobody may be at work.

        Args:
            first_round: the round that is to be lent next.
            lent: whether the learner still holds the batch of the round before.
            ahead: rounds from the first one on that are full already: environments start with
                the round after them.
        """
        if first_round < lent:
            raise ProtocolError("a batch is lent, so the first round is at least 1")
        if ahead > self.num_slots - lent:
            raise ProtocolError(f"{ahead} full rounds don't fit into {self.num_slots} slots")
        for env in range(self.num_envs):
            self.steps[env] = (first_round + ahead) * self.sync_interval
            self.phase[env] = _IDLE
        self.learner[0] = first_round
        self.learner[1] = first_round - lent

    # What anyone may ask.

    def position(self, env: int) -> tuple[int, int]:
        """Round and step within the round of the transition that ``env`` is at."""
        return divmod(self.steps[env], self.sync_interval)

    def slot(self, round_: int) -> int:
        """The slot in which a round lives."""
        return round_ % self.num_slots

    def is_open(self, round_: int) -> bool:
        """Whether transitions of this round may be taken by whoever is ready for it (I4)."""
        if self.last_round is not None and round_ >= self.last_round:
            return False
        return round_ <= self.learner[1] + self.lag

    def is_full(self, round_: int) -> bool:
        """Whether every environment has finished this round (I1)."""
        end = (round_ + 1) * self.sync_interval
        return all(self.steps[env] >= end for env in range(self.num_envs))

    @property
    def lent(self) -> int:
        """The round that is to be lent next: batches handed to the learner so far."""
        return self.learner[0]

    @property
    def released(self) -> int:
        """The number of updates that are done."""
        return self.learner[1]

    @property
    def learning(self) -> bool:
        """Whether the learner holds a batch whose update isn't done."""
        return self.learner[0] > self.learner[1]

    # The executor that owns the environment.

    def offer(self, env: int) -> None:
        """The observation of ``env`` is in its row: an actor may take it. Needs an open round."""
        if self.phase[env] != _IDLE:  # spares the call where all is well, here and below
            self._expect(env, _IDLE, "offered")
        round_ = self.steps[env] // self.sync_interval
        if not self.is_open(round_):  # I4
            raise ProtocolError(f"environment {env} was offered in round {round_}, not open yet")
        self.phase[env] = _READY

    def finish_step(self, env: int) -> bool:
        """The transition of ``env`` is written; returns whether that finished its round."""
        if self.phase[env] != _ANSWERED:
            self._expect(env, _ANSWERED, "stepped")
        self.phase[env] = _IDLE
        self.steps[env] += 1  # I1
        return self.steps[env] % self.sync_interval == 0

    # An actor.

    def take(self, envs: Iterable[int]) -> None:
        """An actor starts to compute the actions of ``envs``: all of them, or it raises."""
        self._pass_on(envs, _READY, _TAKEN, "taken")

    def answer(self, envs: Iterable[int]) -> None:
        """The actions of ``envs`` are in their rows."""
        self._pass_on(envs, _TAKEN, _ANSWERED, "answered")

    # The learner.

    def lend(self) -> int:
        """Hand the next round, which must be full, to the learner; returns the round."""
        round_ = self.learner[0]
        if self.learner[1] != round_:  # I3
            raise ProtocolError(f"round {round_} was lent before update {round_ - 1} was done")
        if not self.is_full(round_):  # I5
            raise ProtocolError(f"round {round_} was lent before it was full")
        self.learner[0] = round_ + 1
        return round_

    def release(self) -> int:
        """The update of the lent round is done: open round + lag + 1; returns the lent round.

        The caller has put the new parameters into the slot already: from here on the executors
        and actors own it (I2, I5).
        """
        if self.learner[0] != self.learner[1] + 1:
            raise ProtocolError("release without a batch lent")
        round_ = self.learner[1]
        self.learner[1] = round_ + 1  # I4: this one word opens the round for everybody
        return round_

    # After a failure.

    def recover(self, lost: Iterable[int]) -> None:
        """Put back what failed workers held. They have ended, and everybody else is at rest.

        The transition that an environment was at begins anew if its executor has failed, with an
        observation of the next one. What an actor had taken is ready again: its action depends on
        the row alone, whoever computes it (I6). Transitions that were finished stay (I1).

        Args:
            lost: the environments whose executors have failed.
        """
        lost = frozenset(lost)
        for env in range(self.num_envs):
            if env in lost:
                self.phase[env] = _IDLE
            elif self.phase[env] == _TAKEN:
                self.phase[env] = _READY

    def _pass_on(self, envs: Iterable[int], held: Phase, then: Phase, event: str) -> None:
        envs, phase = tuple(envs), self.phase
        for env in envs:
            if phase[env] != held:
                self._expect(env, held, event)
        if len(set(envs)) < len(envs):
            raise ProtocolError(f"an environment was {event} twice at once: {envs}")
        for env in envs:
            phase[env] = then

    def _expect(self, env: int, phase: Phase, event: str) -> None:
        if self.phase[env] != phase:
            found = Phase(self.phase[env]).name
            raise ProtocolError(f"environment {env} was {event} while {found}, not {phase.name}")
