"""Every interleaving of programs that share words and pipes, without threads.

A program is a function that is given a `Machine` and does everything that others may see through
it. Each read and write of a shared word, and each operation on a pipe, is one operation. Programs
are never run at the same time. To take a program one operation further it is run again from its
start, with its earlier operations answered from its log, up to the operation after the new one. So
a state is a value (words, pipes, the programs' logs), and each is visited once, with the number of
interleavings that lead to it. The memory is sequentially consistent; a pipe orders what was written
before a message with what is read after it, as the kernel does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torchrl_hts._rounds.exchange import Inbox
from torchrl_hts._rounds.schedule import Schedule

_MAX_STATES = 40_000

Program = Callable[["Machine"], None]
Values = tuple[tuple[str, tuple[int, ...]], ...]


class State(NamedTuple):
    """Everything there is, between two operations."""

    words: Values
    pipes: Values
    logs: tuple[tuple[Any, ...], ...]  # of each program, the results of its operations


class End(NamedTuple):
    """A state in which no program can go on: each has returned or sleeps at an empty pipe.

    Attributes:
        words, pipes: their contents.
        notes: what each program has noted.
        returned: whether each program has.
        ways: interleavings that end here.
    """

    words: dict[str, list[int]]
    pipes: dict[str, list[int]]
    notes: list[tuple[str, ...]]
    returned: list[bool]
    ways: int


class _Pause(BaseException):
    """The program has asked for an operation that is left undone."""


class Machine:
    """What a program sees of the others.

    Args:
        state: the present state.
        log: the results of this program's operations so far.
        sizes: num_envs, sync_interval, lag, last_round of the schedule over the shared words.
    """

    def __init__(
        self, state: State, log: tuple[Any, ...], sizes: tuple[int, int, int, int | None]
    ) -> None:
        self.words = {name: list(values) for name, values in state.words}
        self.pipes = {name: list(values) for name, values in state.pipes}
        self.log = list(log)
        self.notes: list[str] = []
        self.dies_after: int | None = None  # so many operations; None: it lives on
        self._next = 0
        self._end = len(log) + 1
        self._sizes = sizes

    def operate(self, action: Callable[[], Any], pipe: str | None = None) -> Any:
        """One operation; asleep while ``pipe`` is empty, or for ever once it is dead."""
        if self._next == self.dies_after:
            raise _Pause
        if self._next == len(self.log):
            if self._next == self._end or (pipe is not None and not self.pipes[pipe]):
                raise _Pause
            self.log.append(action())
        self._next += 1
        return self.log[self._next - 1]

    def schedule(self) -> Schedule:
        """The schedule over the shared words."""
        n, alpha, lag, last_round = self._sizes
        shared = {name: SharedWords(self, name) for name in ("steps", "phase", "learner")}
        return Schedule(n, alpha, lag, last_round=last_round, **shared)

    def inbox(self, name: str) -> SharedInbox:
        """One of the pipes."""
        return SharedInbox(self, name)

    def sleep(self, name: str) -> None:
        """Sleep until there is something in a pipe; takes nothing."""
        self.operate(lambda: None, pipe=name)

    def note(self, text: str) -> None:
        """Say something that the test wants to know; not an operation."""
        self.notes.append(text)


class SharedWords:
    """Words whose every access is an operation."""

    def __init__(self, machine: Machine, name: str) -> None:
        self._machine = machine
        self._name = name

    def __getitem__(self, index: int) -> int:
        machine = self._machine
        return int(machine.operate(lambda: machine.words[self._name][index]))

    def __setitem__(self, index: int, value: int) -> None:
        machine = self._machine
        machine.operate(lambda: machine.words[self._name].__setitem__(index, int(value)))


class SharedInbox(Inbox):
    """An inbox whose every access is an operation."""

    def __init__(self, machine: Machine, name: str) -> None:
        super().__init__(-1, -1)
        self._machine = machine
        self._name = name

    def post(self, words: Iterable[int]) -> None:
        machine, new = self._machine, [int(word) for word in words]
        machine.operate(lambda: machine.pipes[self._name].extend(new))

    def read(self) -> array[int]:
        return array("H", self._machine.operate(self._read, pipe=self._name))

    def read_ready(self) -> array[int]:
        """Look, read and look again: the same steps as the real one's."""
        machine, words = self._machine, array("H")
        while machine.operate(lambda: bool(machine.pipes[self._name])):
            words.extend(self.read())
        return words

    def _read(self) -> tuple[int, ...]:
        words = tuple(self._machine.pipes[self._name])
        self._machine.pipes[self._name].clear()
        return words


def mortal(program: Program, operations: int) -> Program:
    """A program that dies after so many operations."""

    def run(machine: Machine) -> None:
        machine.dies_after = operations
        program(machine)

    return run


def explore(
    programs: list[Program], begin: Schedule, pipes: dict[str, list[int]]
) -> tuple[list[End], int]:
    """Go through all interleavings; returns how they end, and the number of states.

    Args:
        programs: each is run many times over and must depend on its machine alone.
        begin: the shared words at the beginning.
        pipes: name and initial contents of each.

    Raises:
        AssertionError: if there are more states than any of the tests needs.
    """
    sizes = (begin.num_envs, begin.sync_interval, begin.lag, begin.last_round)
    words = {"steps": begin.steps, "phase": begin.phase, "learner": begin.learner}
    state = State(_freeze(words), _freeze(pipes), ((),) * len(programs))
    ends: list[End] = []
    states = 0
    level = {state: 1}  # every operation lengthens one log, so that levels don't overlap
    while level:
        after: dict[State, int] = {}
        for state, ways in level.items():
            states += 1
            if states > _MAX_STATES:
                raise AssertionError(f"the programs never come to an end: {state}")
            machines, returned = [], []
            for index, program in enumerate(programs):
                log = state.logs[index]
                machine = Machine(state, log, sizes)
                try:
                    program(machine)
                    returned.append(True)
                except _Pause:
                    returned.append(False)
                machines.append(machine)
                if len(machine.log) > len(log):
                    logs = (*state.logs[:index], tuple(machine.log), *state.logs[index + 1 :])
                    then = State(_freeze(machine.words), _freeze(machine.pipes), logs)
                    after[then] = after.get(then, 0) + ways
            if all(len(m.log) == len(log) for m, log in zip(machines, state.logs, strict=True)):
                notes = [tuple(machine.notes) for machine in machines]
                last = machines[0]
                ends.append(End(last.words, last.pipes, notes, returned, ways))
        level = after
    return ends, states


def _freeze(values: dict[str, Any]) -> Values:
    return tuple((name, tuple(words)) for name, words in values.items())
