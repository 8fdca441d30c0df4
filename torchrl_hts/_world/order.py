"""Where in a run a rank is, in words: they tell an exchange from another one of its kind.

No torch, and nobody waits here.
"""

from __future__ import annotations

__all__ = ["Order"]


class Order:
    """Counts rounds, and passes over gradients within them, for the names of exchanges.

    Every rank counts alike. A rank that has left out a pass or a round so has another name for its
    next exchange than the others have.
    """

    def __init__(self) -> None:
        self._round: int | None = None
        self._pass = 0

    def begin_round(self, round_: int) -> None:
        """A batch is handed out, the one of this round."""
        self._round, self._pass = round_, 0

    def begin_pass(self) -> None:
        """Gradients are taken: of a batch, or a minibatch."""
        self._pass += 1

    def name(self, what: str, length: int) -> str:
        """What the next exchange is, the same on every rank.

        Args:
            what: is exchanged.
            length: of the vector, or 0 if it is none.

        Example:
            >>> order = Order()
            >>> order.name("gradients", 1000)
            'gradients of 1,000 values'
            >>> order.begin_round(7)
            >>> order.begin_pass()
            >>> order.name("gradients", 1000), order.name("any", 0)
            ('gradients of 1,000 values in pass 1 of round 7', 'any in pass 1 of round 7')
        """
        of = f"{what} of {length:,} values" if length else what
        if self._round is None:
            return of
        return f"{of} in {f'pass {self._pass} of ' * (self._pass > 0)}round {self._round}"
