"""Names of exchanges, and which of them need no comparison."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrl_hts._world.order import Order


def rounds_of(order: Order, *rounds: str) -> list[list[bool]]:
    """Whether the exchanges of each round were foreseen; a letter is one."""
    found = []
    for number, letters in enumerate(rounds):
        order.begin_round(number)
        found.append([order.next(letter, 0)[1] for letter in letters])
    return found


def test_what_the_round_before_had_is_foreseen_up_to_the_first_difference() -> None:
    found = rounds_of(Order(), "abc", "abc", "abxc", "ab", "abx")
    no, yes = False, True
    assert found == [[no] * 3, [no, yes, yes], [no, yes, no, no], [no, yes], [no, yes, no]]


def test_outside_of_rounds_nothing_is_foreseen() -> None:
    order = Order()
    assert [order.next("a", 3) for _ in range(3)] == [("a of 3 values", False)] * 3


@given(
    rounds=st.lists(st.text("ab", max_size=4), min_size=1, max_size=4),
    others=st.lists(st.text("ab", max_size=4), min_size=1, max_size=4),
)
def test_no_two_ranks_foresee_different_things(rounds: list[str], others: list[str]) -> None:
    """They go on together while both compare and find the same, or neither compares."""

    def exchanges(of: list[str]) -> list[tuple[str, bool]]:
        order, found = Order(), []
        for number, letters in enumerate(of):
            order.begin_round(number)
            found += [order.next(letter, 0) for letter in letters]
        return found

    for (name, foreseen), (other, too) in zip(exchanges(rounds), exchanges(others), strict=False):
        if foreseen != too or (not foreseen and name != other):
            break  # they wait in vain for each other, or have found out
        assert name == other
