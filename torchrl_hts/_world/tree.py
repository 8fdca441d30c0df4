"""In which order ranks add: a binary tree, neighbours first. No torch, and nobody waits here.

The values of 2^k ranks are added as ``((0 + 1) + (2 + 3)) + ...``, whoever computes it. Sums of
two have the same bits in either order, so both ranks of a pair arrive at the same sum. A rank that
adds its own values in the same order first (`tree_sum`) extends the tree downwards. So the sum of V
values has the same bits for every number of ranks that divides V.

Two ways to walk the same tree: *doubling* swaps the whole vector at each level, and takes the
fewest messages; *halving* swaps half of what is left at each level and collects the parts in the
end, and sends the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple, TypeVar

from torchrl_hts.errors.checks import check_integer

__all__ = [
    "Swap",
    "check_shards",
    "doubling",
    "fitting",
    "halving",
    "swaps",
    "tree_sum",
]

# From so many values on halving is quicker: messages cost as much as some bytes.
_HALVING_FROM = 65_536

T = TypeVar("T")


class Swap(NamedTuple):
    """Two ranks send each other a part of their vectors at the same time.

    Attributes:
        peer: the other rank, which does the same the other way round.
        give: first and last + 1 of the values sent.
        take: first and last + 1 of those that the peer's values are for.
        adds: whether they are added to the own ones, or stand in their place.
    """

    peer: int
    give: tuple[int, int]
    take: tuple[int, int]
    adds: bool


def is_power_of_two(number: int) -> bool:
    """Whether a tree of so many leaves is full.

    Example:
        >>> [n for n in range(9) if is_power_of_two(n)]
        [1, 2, 4, 8]
    """
    return number > 0 and number & (number - 1) == 0


def check_shards(shards: int) -> int:
    """So many shards as a plain int, if there can be so many."""
    checked = check_integer("shards", shards)
    if not is_power_of_two(checked):
        raise ValueError(f"shards must be None or a power of two, got {checked}")
    return checked


def fitting(size: int, shards: int) -> int:
    """How many of so many learners can share out 2^k shards equally, at the most.

    Example:
        >>> [fitting(size, 4) for size in range(1, 7)]
        [1, 2, 2, 4, 4, 4]
    """
    return min(shards, 1 << size.bit_length() - 1)


def tree_sum(values: Sequence[T], add: Callable[[T, T], T] = add) -> T:
    """The sum of 2^k values, neighbours first.

    Raises:
        ValueError: if they are not a power of two.

    Example:
        >>> tree_sum("abcd", lambda a, b: f"({a}+{b})")
        '((a+b)+(c+d))'
    """
    if not is_power_of_two(len(values)):
        raise ValueError(f"expected a power of two of values to add, got {len(values)}")
    level = list(values)
    while len(level) > 1:
        level = [add(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def doubling(rank: int, size: int, length: int) -> list[Swap]:
    """What a rank does to have the sum of all ranks' vectors, whole vectors at a time.

    Example:
        >>> [(swap.peer, swap.take) for swap in doubling(rank=2, size=4, length=10)]
        [(3, (0, 10)), (0, (0, 10))]
    """
    whole = (0, length)
    return [Swap(rank ^ distance, whole, whole, adds=True) for distance in _distances(rank, size)]


def halving(rank: int, size: int, length: int) -> list[Swap]:
    """The same by halves: each rank ends up with the sum of one slice, and then collects the rest.

    Peers at each level share what the levels before left them, since they have the same low bits.

    Example:
        >>> for swap in halving(rank=2, size=4, length=10):
        ...     print(swap.peer, swap.give, swap.take, "add" if swap.adds else "copy")
        3 (5, 10) (0, 5) add
        0 (0, 2) (2, 5) add
        0 (2, 5) (0, 2) copy
        3 (0, 5) (5, 10) copy
    """
    low, high = 0, length
    down: list[Swap] = []
    for distance in _distances(rank, size):
        middle = (low + high) // 2
        keep, give = (low, middle), (middle, high)
        if rank & distance:
            keep, give = give, keep
        down.append(Swap(rank ^ distance, give, keep, adds=True))
        low, high = keep
    up = [Swap(peer, take, give, adds=False) for peer, give, take, _ in reversed(down)]
    return down + up


def swaps(rank: int, size: int, length: int) -> list[Swap]:
    """The quicker of the two ways for a vector of so many values."""
    way = halving if length >= _HALVING_FROM else doubling
    return way(rank, size, length)


def _distances(rank: int, size: int) -> list[int]:
    if not is_power_of_two(size) or not 0 <= rank < size:
        raise ValueError(f"expected a rank of a power of two of them, got rank {rank} of {size}")
    return [1 << level for level in range(size.bit_length() - 1)]
