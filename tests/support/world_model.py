"""Every order in which ranks can go through a run, with a rank that ends anywhere; no processes.

A rank is a generator. It yields what it asks for and is sent the answer:

- `Talk`: its value for some peers; it is sent theirs and its own, in the order of ranks, once all
  have come to the talk of the same number;
- `Choose`: the outcome of something that it alone knows; every outcome is explored;
- `Note`: something that it has done where others can see it.

A peer that has ended before it came makes a talk fail, as a closed connection does. One that has
died after it came, or has lost a peer, may have been heard or not: both are explored. Silence (a
time-out) ends a talk in the same way, later, and so is no case of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import cache
from typing import Any, NamedTuple


class Talk(NamedTuple):
    peers: tuple[int, ...]
    what: str
    value: Any


class Choose(NamedTuple):
    first: Any
    other: Any  # takes one of the budget


class Note(NamedTuple):
    what: str


class LostError(Exception):
    """A peer has ended."""


class Ended(NamedTuple):
    """How a rank has ended: ``returned``, ``raised``, ``died`` or ``waits`` for ever."""

    how: str
    what: Any = None


class End(NamedTuple):
    """A state in which nobody can go on.

    Attributes:
        ranks: how each rank has ended.
        notes: what each rank has done.
        talks: how many talks each rank has finished.
    """

    ranks: tuple[Ended, ...]
    notes: tuple[tuple[str, ...], ...]
    talks: tuple[int, ...]


class _At(NamedTuple):
    """Where a rank is after so many answers."""

    ask: Any  # or its end
    notes: tuple[str, ...]
    talks: tuple[Talk, ...]  # finished


class _Rank(NamedTuple):
    log: tuple[Any, ...] = ()  # answers so far
    came: bool = False  # it has said its value in the talk that it is at
    died: bool = False


_LOST = object()


class _Run:
    """A program that every rank runs, and what may happen to it next.

    Args:
        program: of a rank.
        deaths: so many ranks may end at any point.
    """

    def __init__(self, program: Callable[[int], Generator[Any, Any, Any]], deaths: int) -> None:
        self._program, self._deaths = program, deaths
        self.at = cache(self._at)

    def _at(self, rank: int, log: tuple[Any, ...]) -> _At:
        """Where a rank is after these answers."""
        generator, answers = self._program(rank), iter(log)
        notes: list[str] = []
        talks: list[Talk] = []
        try:
            ask = next(generator)
            while True:
                if isinstance(ask, Note):
                    notes.append(ask.what)
                    ask = generator.send(None)
                    continue
                try:
                    answer = next(answers)
                except StopIteration:
                    return _At(ask, tuple(notes), tuple(talks))
                if isinstance(ask, Talk):
                    talks.append(ask)
                ask = generator.throw(LostError()) if answer is _LOST else generator.send(answer)
        except StopIteration as end:
            ended = Ended("returned", end.value)
        except Exception as error:
            ended = Ended("raised", f"{type(error).__name__}: {error}")
        return _At(ended, tuple(notes), tuple(talks))

    def _heard(self, own: Talk, number: int, rank: int, peer: int, one: _Rank) -> tuple[bool, bool]:
        """Whether what a peer says in a talk can be heard, and whether that can fail."""
        there = self.at(peer, one.log)
        said = [*there.talks, *([there.ask] if one.came else [])]
        came = len(said) > number and rank in said[number].peers and said[number].what == own.what
        gone = one.died or isinstance(there.ask, Ended)
        # By itself, after it had heard all: what it sent before it closed its connections arrives.
        at_ease = gone and not one.died and not str(there.ask.what).startswith("Lost")
        return came, gone and not (came and at_ease)

    def _value(self, number: int, peer: int, one: _Rank) -> Any:
        there = self.at(peer, one.log)
        return [*there.talks, there.ask][number].value

    def _options(self, ranks: tuple[_Rank, ...], r: int, left: int) -> list[tuple[_Rank, int]]:
        """What may happen to a rank next, but for its death."""
        one = ranks[r]
        ask, _, talks = self.at(r, one.log)
        if one.died or isinstance(ask, Ended):
            return []
        if isinstance(ask, Choose):
            other = [(_Rank((*one.log, ask.other)), left - 1)] if left else []
            return [(_Rank((*one.log, ask.first)), left), *other]
        if not one.came:
            return [(one._replace(came=True), left)]
        found = []
        peers = [peer for peer in ask.peers if peer != r]
        ears = [self._heard(ask, len(talks), r, peer, ranks[peer]) for peer in peers]
        if all(came for came, _ in ears):
            values = {peer: self._value(len(talks), peer, ranks[peer]) for peer in peers}
            values[r] = ask.value
            answer = tuple(values[peer] for peer in sorted(values))
            found.append((_Rank((*one.log, answer)), left))
        if any(fails for _, fails in ears):
            found.append((_Rank((*one.log, _LOST)), left))
        return found

    def moves(self, ranks: tuple[_Rank, ...], left: int) -> list[tuple[tuple[_Rank, ...], int]]:
        """What may happen next, but for deaths."""
        return [
            ((*ranks[:r], new, *ranks[r + 1 :]), then)
            for r in range(len(ranks))
            for new, then in self._options(ranks, r, left)
        ]

    def deaths(self, ranks: tuple[_Rank, ...]) -> list[tuple[_Rank, ...]]:
        """The same, with one more rank that has died."""
        if sum(one.died for one in ranks) >= self._deaths:
            return []
        alive = [r for r, one in enumerate(ranks) if not isinstance(self.at(r, one.log).ask, Ended)]
        return [(*ranks[:r], ranks[r]._replace(died=True), *ranks[r + 1 :]) for r in alive]

    def end(self, ranks: tuple[_Rank, ...]) -> End:
        """What has become of all, where nobody can go on."""
        places = [self.at(r, one.log) for r, one in enumerate(ranks)]
        hows = [
            Ended("died")
            if one.died
            else place.ask
            if isinstance(place.ask, Ended)
            else Ended("waits", place.ask)
            for one, place in zip(ranks, places, strict=True)
        ]
        notes = tuple(place.notes for place in places)
        return End(tuple(hows), notes, tuple(len(place.talks) for place in places))


def explore(
    program: Callable[[int], Generator[Any, Any, Any]],
    size: int,
    *,
    deaths: int = 0,
    budget: int = 0,
) -> list[End]:
    """All ends of a run.

    Args:
        program: of a rank.
        size: ranks.
        deaths: so many of them may end at any point.
        budget: so many choices may turn out otherwise.
    """
    run = _Run(program, deaths)
    start = (tuple(_Rank() for _ in range(size)), budget)
    seen, stack = {start}, [start]
    ends: dict[End, None] = {}
    while stack:
        ranks, left = stack.pop()
        following = run.moves(ranks, left)
        if not following:
            ends[run.end(ranks)] = None
        for state in following + [(dead, left) for dead in run.deaths(ranks)]:
            if state not in seen:
                seen.add(state)
                stack.append(state)
    return [*ends]
