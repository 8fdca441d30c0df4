"""What ranks ask each other, and in which order: every decision that more than one rank takes.

Nothing here waits, and nothing here knows torch. A conversation is a generator: it yields a value
of this rank, and is sent the values of all ranks in return, its own among them. `talk` runs it; who
brings the values together is the caller's business (`group.py`, or a model in the tests).

The order of a run, which is the same on every rank:

1. `agree`, at the start and after 1, 2, 4, ... updates: do all ranks mean, and do, the same? At the
   start `any_of`, if there are more ranks than can learn: those too many leave the order
   (`spares.py`), and what follows is among the others;
2. in each round any number of sums (`tree.py`): statistics, gradients;
3. `any_of`, once a round, where somebody may want to stop: stops everybody at the same round;
4. `save`, where all have decided so: each rank its part, then rank 0 the marker.

Rules that keep a rank from waiting for another that never comes:

- **W1** What a rank does next depends on the options, which are agreed, and on what all ranks were
  sent alike: never on what it alone knows.
- **W2** What a rank alone knows (a signal, a full disk) is told to all in the next exchange, and
  acted on after it.
- **W3** A rank that can't go on raises and ends. Ending closes its connections, and whoever waits
  for it raises (`group.py`); so an end travels to all ranks.
- **W4** A marker is written after every rank has said that its part is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from torchrl_hts.errors import WorldError

__all__ = ["Conversation", "agree", "any_of", "save", "talk"]

T = TypeVar("T")
Conversation = Generator[Any, list[Any], T]


def talk(conversation: Conversation[T], gather: Callable[[Any], list[Any]]) -> T:
    """Hold a conversation.

    Args:
        conversation: what this rank says.
        gather: takes this rank's value and returns those of all ranks, in their order.

    Example:
        >>> talk(any_of(False), gather=lambda flag: [flag, True])
        True
    """
    try:
        value = next(conversation)
        while True:
            value = conversation.send(gather(value))
    except StopIteration as end:
        result: T = end.value
        return result


def agree(facts: Mapping[str, Any]) -> Conversation[None]:
    """Raise on every rank, with the odd one named, unless all have the same facts.

    Args:
        facts: names and values whose texts are compared.

    Raises:
        WorldError: names the rank, what it has, and what the others have.
    """
    rows: list[tuple[tuple[str, str], ...]]
    rows = yield tuple((name, str(value)) for name, value in facts.items())
    table = [dict(row) for row in rows]
    for name in dict.fromkeys(name for row in table for name in row):
        column = [row.get(name, "nothing") for row in table]
        if len(set(column)) > 1:
            # Of a tie, what the lowest rank has.
            usual = Counter(column).most_common(1)[0][0]
            odd = [rank for rank, text in enumerate(column) if text != usual]
            raise WorldError(
                f"{_named(odd)} has {name} {column[odd[0]]}, the others {usual}: all ranks of a "
                "run must have the same, by the same code, options and versions"
            )


def any_of(flag: bool) -> Conversation[bool]:
    """Whether the flag of any rank is set; the same answer on every rank (W2)."""
    flags: list[bool] = yield bool(flag)
    return any(flags)


def save(
    rank: int, write_part: Callable[[], object], write_marker: Callable[[], object]
) -> Conversation[None]:
    """Have a checkpoint written by all ranks: complete, or without a marker (W4).

    Args:
        rank: of this process.
        write_part: writes what this rank has.
        write_marker: says that the checkpoint is complete; called on rank 0 alone.

    Raises:
        WorldError: on every rank, if it has failed on one; the cause is that of this rank, if any.
    """
    for step, does in (write_part, True), (write_marker, rank == 0):
        error = _attempt(step) if does else None
        told = error and f"{type(error).__name__}: {error}"
        failures: list[str | None] = yield told  # W2: also a rank that has failed comes here
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if failed:
            raise WorldError(
                f"{_named(failed)} could not write the checkpoint, which is not complete: "
                f"{failures[failed[0]]}"
            ) from error


def _attempt(step: Callable[[], object]) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
