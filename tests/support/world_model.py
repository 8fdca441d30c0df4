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

    @cache
    def at(rank: int, log: tuple[Any, ...]) -> _At:
        generator, answers = program(rank), iter(log)
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

    def heard(own: Talk, number: int, rank: int, peer: int, one: _Rank) -> tuple[bool, bool]:
        """Whether what a peer says in a talk can be heard, and whether that can fail."""
        there = at(peer, one.log)
        said = [*there.talks, *([there.ask] if one.came else [])]
        came = len(said) > number and rank in said[number].peers and said[number].what == own.what
        gone = one.died or isinstance(there.ask, Ended)
        # By itself, after it had heard all: what it sent before it closed its connections arrives.
        at_ease = gone and not one.died and not str(there.ask.what).startswith("Lost")
        return came, gone and not (came and at_ease)

    def value(number: int, peer: int, one: _Rank) -> Any:
        there = at(peer, one.log)
        return [*there.talks, there.ask][number].value

    def moves(ranks: tuple[_Rank, ...], left: int) -> list[tuple[tuple[_Rank, ...], int]]:
        """What may happen next, but for deaths."""
        found = []
        for r, one in enumerate(ranks):
            ask, _, talks = at(r, one.log)
            options: list[tuple[_Rank, int]] = []
            if one.died or isinstance(ask, Ended):
                continue
            if isinstance(ask, Choose):
                options.append((_Rank((*one.log, ask.first)), left))
                if left:
                    options.append((_Rank((*one.log, ask.other)), left - 1))
            elif not one.came:
                options.append((one._replace(came=True), left))
            else:
                peers = [peer for peer in ask.peers if peer != r]
                ears = [heard(ask, len(talks), r, peer, ranks[peer]) for peer in peers]
                if all(came for came, _ in ears):
                    values = {peer: value(len(talks), peer, ranks[peer]) for peer in peers}
                    values[r] = ask.value
                    answer = tuple(values[peer] for peer in sorted(values))
                    options.append((_Rank((*one.log, answer)), left))
                if any(fails for _, fails in ears):
                    options.append((_Rank((*one.log, _LOST)), left))
            found += [((*ranks[:r], new, *ranks[r + 1 :]), then) for new, then in options]
        return found

    def dying(ranks: tuple[_Rank, ...]) -> list[tuple[_Rank, ...]]:
        if sum(one.died for one in ranks) >= deaths:
            return []
        alive = [r for r, one in enumerate(ranks) if not isinstance(at(r, one.log).ask, Ended)]
        return [(*ranks[:r], ranks[r]._replace(died=True), *ranks[r + 1 :]) for r in alive]

    start = (tuple(_Rank() for _ in range(size)), budget)
    seen, stack = {start}, [start]
    ends: dict[End, None] = {}
    while stack:
        ranks, left = stack.pop()
        following = moves(ranks, left)
        if not following:
            places = [at(r, one.log) for r, one in enumerate(ranks)]
            hows = [
                Ended("died")
                if one.died
                else place.ask
                if isinstance(place.ask, Ended)
                else Ended("waits", place.ask)
                for one, place in zip(ranks, places, strict=True)
            ]
            notes = tuple(place.notes for place in places)
            ends[End(tuple(hows), notes, tuple(len(place.talks) for place in places))] = None
        for state in following + [(dead, left) for dead in dying(ranks)]:
            if state not in seen:
                seen.add(state)
                stack.append(state)
    return [*ends]
