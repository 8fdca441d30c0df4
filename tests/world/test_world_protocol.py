"""Many learners' conversations: in every order, with failures anywhere, nobody waits for ever."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world_model import Choose, End, LostError, Note, Talk, explore

from torchrl_hts._world import protocol
from torchrl_hts._world.tree import doubling, halving, swaps, tree_sum
from torchrl_hts.errors import WorldError

ROUNDS = 2


def held(conversation: Any, size: int, what: str) -> Generator[Any, Any, Any]:
    """A conversation whose gathering is a talk of all."""
    try:
        value = next(conversation)
        while True:
            value = conversation.send(list((yield Talk(tuple(range(size)), what, value))))
    except StopIteration as end:
        return end.value


def summed(rank: int, size: int, length: int, values: list[str]) -> Generator[Any, Any, list[str]]:
    """What `Group.tree_sum` does, with texts that say what was added to what."""
    for peer, give, take, adds in swaps(rank, size, length):
        first, second = (rank, peer) if rank < peer else (peer, rank)
        pair = yield Talk((first, second), "sum", tuple(values[slice(*give)]))
        got = pair[1] if peer > rank else pair[0]
        for place, value in zip(range(*take), got, strict=True):
            own = values[place]
            both = (own, value) if rank < peer else (value, own)
            values[place] = f"({both[0]}+{both[1]})" if adds else value
    return values


def run(rank: int, size: int, rounds: int = ROUNDS) -> Generator[Any, Any, Any]:
    """A run of a learner: start, rounds with an exchange, a stop by a signal, a checkpoint."""
    yield from held(protocol.agree({"seed": 0}), size, "agree")
    for round_ in range(rounds):
        total = yield from summed(rank, size, 1, [str(rank)])
        assert total == [tree_sum([str(r) for r in range(size)], lambda a, b: f"({a}+{b})")]
        signalled = yield Choose(False, True)
        stops = yield from held(protocol.any_of(signalled), size, "stop")
        if stops or round_ == rounds - 1:
            break
    disk_is_full = yield Choose(False, True)
    done: list[str] = []

    def write_part() -> None:
        if disk_is_full:
            raise OSError("the disk is full")
        done.append(f"part of round {round_}")

    saving = held(
        protocol.save(rank, write_part, lambda: done.append(f"marker of round {round_}")),
        size,
        "save",
    )
    told = 0
    try:
        ask = next(saving)
        while True:
            for note in done[told:]:
                yield Note(note)
            told = len(done)
            try:
                answer = yield ask
            except LostError as lost:
                ask = saving.throw(lost)
            else:
                ask = saving.send(answer)
    except StopIteration:
        pass
    return round_


def check(end: End, size: int) -> None:
    hows = [rank.how for rank in end.ranks]
    assert "waits" not in hows, end
    parts = {note for notes in end.notes for note in notes if "part" in note}
    markers = [note for notes in end.notes for note in notes if "marker" in note]
    assert len(parts) <= 1  # of one round
    for marker in markers:  # W4
        assert all(marker.replace("marker", "part") in notes for notes in end.notes), end
    if "died" not in hows:
        assert len(set(end.ranks)) == 1, end  # one decision, or one message
        assert len(set(end.talks)) == 1, end
        assert (hows[0] == "returned") == bool(markers)
    elif "returned" in hows:
        assert markers, end  # whoever thinks that it is saved is right


@pytest.mark.parametrize("size", [1, 2, 4])
def test_nobody_waits_for_ever_and_all_decide_alike(size: int) -> None:
    ends = explore(lambda rank: run(rank, size), size, budget=2)
    for end in ends:
        check(end, size)
    told = {str(end.ranks[0].what) for end in ends}
    assert {"0", "1"} <= told  # stopped by a signal, and not
    for rank in range(size):
        assert any(f"rank {rank} could not write" in text for text in told)


@pytest.mark.parametrize(("size", "rounds", "budget"), [(1, 2, 2), (2, 2, 2), (4, 1, 0)])
def test_nobody_waits_for_a_rank_that_has_died(size: int, rounds: int, budget: int) -> None:
    ends = explore(lambda rank: run(rank, size, rounds), size, deaths=1, budget=budget)
    for end in ends:
        check(end, size)
    assert any(rank.how == "died" for end in ends for rank in end.ranks)
    assert (size == 1) or any("Lost" in str(rank.what) for end in ends for rank in end.ranks)


def test_the_model_tells_of_an_exchange_that_a_rank_does_not_reach() -> None:
    def early(rank: int) -> Iterator[Any]:
        """Breaks W2: acts on its own signal before the others know of it."""
        signalled = yield Choose(False, True)
        if not signalled or rank:
            yield from held(protocol.any_of(signalled), 2, "stop")
        yield from held(protocol.any_of(False), 2, "more")

    ends = explore(early, 2, budget=1)
    assert any(rank.how == "waits" for end in ends for rank in end.ranks)


@pytest.mark.parametrize("odd", range(4))
def test_agreement_names_the_odd_rank_on_every_rank(odd: int) -> None:
    table: list[Any] = [(("seed", "1"), ("lag", "1")) for _ in range(4)]
    table[odd] = (("seed", "2"), ("lag", "1"))
    for facts in table:
        with pytest.raises(WorldError, match=f"rank {odd} has seed 2, the others 1"):
            protocol.talk(protocol.agree(dict(facts)), lambda value: table)


def test_agreement_names_a_fact_that_one_rank_lacks() -> None:
    with pytest.raises(WorldError, match="rank 1 has lag nothing, the others 2"):
        protocol.talk(protocol.agree({"lag": 2}), lambda value: [value, ()])


@given(
    size=st.sampled_from([1, 2, 4, 8]),
    length=st.integers(0, 70),
    by_halves=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_value_is_added_in_the_order_of_the_tree(
    size: int, length: int, by_halves: bool
) -> None:
    way = halving if by_halves else doubling
    vectors = [[f"{rank}" for _ in range(length)] for rank in range(size)]
    plans = [way(rank, size, length) for rank in range(size)]
    for level in zip(*plans, strict=True):
        before = [list(vector) for vector in vectors]
        for rank, (peer, give, take, adds) in enumerate(level):
            back = level[peer]
            assert (back.peer, back.give, back.take, back.adds) == (rank, take, give, adds)
            for place in range(*take):
                own, got = before[rank][place], before[peer][place]
                first, second = (own, got) if rank < peer else (got, own)
                vectors[rank][place] = f"({first}+{second})" if adds else got
    expected = tree_sum([str(rank) for rank in range(size)], lambda a, b: f"({a}+{b})")
    assert all(vector == [expected] * length for vector in vectors)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_tree_goes_on_within_a_rank(size: int) -> None:
    shards = 8

    def add(a: str, b: str) -> str:
        return f"({a}+{b})"

    leaves = [str(shard) for shard in range(shards)]
    own = [tree_sum(leaves[i : i + shards // size], add) for i in range(0, shards, shards // size)]
    assert tree_sum(own, add) == tree_sum(leaves, add)
