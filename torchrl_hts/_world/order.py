"""Which exchange a rank has come to, in words, and whether others must be at the same one.

No torch, and nobody waits here.
"""

from __future__ import annotations

__all__ = ["Order"]


class Order:
    """Counts rounds, and passes over gradients within them, for the names of exchanges.

    Every rank counts alike. So one that has left out a pass or a round comes to an exchange whose
    name is another than the others': where the round ends at the latest.

    A round mostly takes the exchanges of the round before, in their order. One that does so is
    *foreseen*, as long as all before it in its round were, but for the first, which never is. Ranks
    need to compare names only in exchanges that were not foreseen. In the others all have foreseen
    the same, since all have been through the same round before.
    """

    def __init__(self) -> None:
        self._round: int | None = None
        self._pass = 0
        self._before: list[str] = []  # exchanges of the round before
        self._now: list[str] = []
        self._foreseen = False

    def begin_round(self, round_: int) -> None:
        """A batch is handed out, the one of this round."""
        self._round, self._pass = round_, 0
        self._before, self._now = self._now, []

    def begin_pass(self) -> None:
        """Gradients are taken: of a batch, or a minibatch."""
        self._pass += 1

    def next(self, what: str, length: int) -> tuple[str, bool]:
        """What the next exchange is, the same on every rank, and whether it was foreseen.

        Args:
            what: is exchanged.
            length: of the vector, or 0 if it is none.

        Example:
            >>> order = Order()
            >>> order.next("gradients", 1000)
            ('gradients of 1,000 values', False)
            >>> for round_ in (6, 7):
            ...     order.begin_round(round_)
            ...     order.next("any", 0)
            ...     order.begin_pass()
            ...     order.next("gradients", 1000)
            ('any in round 6', False)
            ('gradients of 1,000 values in pass 1 of round 6', False)
            ('any in round 7', False)
            ('gradients of 1,000 values in pass 1 of round 7', True)
        """
        of = f"{what} of {length:,} values" if length else what
        if self._round is None:
            return of, False
        at = len(self._now)
        self._now.append(of)
        as_before = self._before[at : at + 1] == [of]
        self._foreseen = as_before and (at == 0 or self._foreseen)
        where = f"pass {self._pass} of " * (self._pass > 0)
        return f"{of} in {where}round {self._round}", self._foreseen and at > 0
