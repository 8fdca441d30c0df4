"""Every interleaving of the schedule's events, for small sizes.

The states are visited in the order of the transitions and batches that they have behind them, each
once, with the number of ways that lead to it. A state includes all that was ever written and with
which parameters, so that two ways meet only if they have the same past result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from schedule_of_batches import WorldOfBatches
from schedule_reference import (
    World,
    arbitrary_events,
    expected_batch,
    expected_values,
)

from torchrl_hts._rounds.schedule import Phase, Schedule

NUM_ENVS, ALPHA = 2, 2
LOST = [(), (0,), (1,), (0, 1)]  # environments of the executors that fail


@dataclass
class Explored:
    """What an exploration has seen.

    Attributes:
        states: how many.
        interleavings: orders of events from the beginning to an end.
        refused: illegal events tried.
        spreads: differences between the rounds of the two environments, both under way.
        ends: the worlds in which all has been learned.
    """

    states: int = 0
    interleavings: int = 0
    refused: int = 0
    spreads: set[int] = field(default_factory=set)
    ends: list[World] = field(default_factory=list)


def progress(world: World) -> int:
    """Grows with every event; a failure counts for more than all it may undo."""
    schedule = world.schedule
    turns = sum(4 * schedule.steps[i] + schedule.phase[i] for i in range(world.num_envs))
    made = turns + schedule.lent + schedule.released + 1000 * world.failures
    return 10 * made + world.rows_run()


def explore(begin: World, failures: int = 0) -> Explored:
    """Visit every state; `World` checks I1 to I5 in each.

    Args:
        failures: how often, at most, workers fail: in any state, any executors and all actors that
            hold something.
    """
    explored = Explored()
    everything = list(arbitrary_events(begin.num_envs, begin.num_actors))
    level: defaultdict[int, dict[object, tuple[World, int]]] = defaultdict(dict)
    level[0][begin.key()] = (begin, 1)
    while level:
        now = min(level)
        for world, ways in level.pop(now).values():
            explored.states += 1
            if not any(phase == Phase.IDLE for phase in world.schedule.phase):
                explored.spreads.add(world.round(0) - world.round(1))
            for event in everything:
                if not world.legal(event):
                    world.refuse(event)
                    explored.refused += 1
            events = world.enabled()
            if not events:
                explored.interleavings += ways
                explored.ends.append(world)
            if world.failures < failures:
                events += [("recover", lost) for lost in LOST]
            for event in events:
                after = world.clone()
                after.apply(event)
                assert progress(after) > now
                bucket, key = level[progress(after)], after.key()
                bucket[key] = (after, ways + bucket.get(key, (after, 0))[1])
    return explored


# The numbers of states are what this exploration once counted: it can't silently become empty.
@pytest.mark.parametrize(
    ("lag", "num_actors", "rounds", "at_least"),
    [
        (0, 1, 5, 411),
        (0, 2, 5, 611),
        (1, 1, 5, 1531),
        (1, 2, 4, 1761),
        (2, 1, 5, 3091),
        (2, 2, 4, 3345),
    ],
)
def test_every_interleaving(
    lag: int,
    num_actors: int,
    rounds: int,
    at_least: int,
    record_property: Callable[[str, object], None],
) -> None:
    """I1 to I5 in every state, no dead end, and one result (I7) for 2 environments, alpha 2."""
    schedule = Schedule(NUM_ENVS, ALPHA, lag, last_round=rounds)
    explored = explore(World(schedule, num_actors))
    record_property("states", explored.states)
    record_property("interleavings", explored.interleavings)
    assert explored.states >= at_least
    assert explored.interleavings > 10**17
    assert explored.refused > explored.states

    # I4: there is no barrier, so that the environments are up to lag rounds apart, and no more.
    assert explored.spreads == set(range(-lag, lag + 1))

    # I7: all interleavings end in one state, in which every round has been learned.
    (end,) = explored.ends
    assert end.all_learned()
    values = expected_values(NUM_ENVS, ALPHA, lag, rounds)
    batches = [expected_batch(NUM_ENVS, ALPHA, j, values[j]) for j in range(rounds)]
    for env, trace in enumerate(end.trace):
        assert trace == sum((batch[env] for batch in batches), ())
    assert end.newest == values[-1]


@pytest.mark.parametrize(
    ("lag", "num_actors", "rounds", "failures", "at_least"),
    [(0, 1, 2, 2, 400), (0, 2, 2, 1, 300), (1, 1, 3, 1, 1000), (1, 2, 2, 2, 1000)],
)
def test_every_interleaving_with_failures(
    lag: int, num_actors: int, rounds: int, failures: int, at_least: int
) -> None:
    """I1 to I5 whenever and whoever fails; the learner gets as many transitions, in order.

    What an environment observes after its executor was replaced is not part of this model. All that
    is (whose transition it is, its place, the parameters it was taken with) is as without.
    """
    schedule = Schedule(NUM_ENVS, ALPHA, lag, last_round=rounds)
    explored = explore(World(schedule, num_actors), failures)
    assert explored.states >= at_least
    assert {world.failures for world in explored.ends} == set(range(failures + 1))
    values = expected_values(NUM_ENVS, ALPHA, lag, rounds)
    batches = [expected_batch(NUM_ENVS, ALPHA, j, values[j]) for j in range(rounds)]
    for end in explored.ends:
        assert end.all_learned()
        assert end.newest == values[-1]
        assert end.trace == [sum((b[env] for b in batches), ()) for env in range(NUM_ENVS)]


@pytest.mark.parametrize(
    ("sizes", "lag", "num_actors", "rounds", "failures", "at_least"),
    [((2, 1), 1, 2, 3, 0, 2000), ((2, 2), 0, 1, 3, 0, 400), ((3, 1), 1, 1, 2, 1, 1000)],
)
def test_every_interleaving_of_batches(
    sizes: tuple[int, ...], lag: int, num_actors: int, rounds: int, failures: int, at_least: int
) -> None:
    """I1 to I5 where a batch of environments is one to the schedule, run a row at a time."""
    schedule = Schedule(NUM_ENVS, ALPHA, lag, last_round=rounds)
    explored = explore(WorldOfBatches(schedule, sizes, num_actors), failures)
    assert explored.states >= at_least
    num_envs = sum(sizes)
    values = expected_values(num_envs, ALPHA, lag, rounds)
    assert {end.newest for end in explored.ends} == {values[-1]}
    for end in explored.ends:
        steps = [step for trace in end.trace for row in zip(*trace, strict=True) for step in row]
        wanted = [expected_batch(num_envs, ALPHA, j, values[j]) for j in range(rounds)]
        assert steps == [step for env in range(num_envs) for b in wanted for step in b[env]]


class FirstRoundTooLong(Schedule):
    """The authors' fault: the first round ends after alpha + 1 steps."""

    def finish_step(self, env: int) -> bool:
        super().finish_step(env)
        return self.steps[env] % self.sync_interval == 1 and self.steps[env] > 1

    def position(self, env: int) -> tuple[int, int]:
        if self.steps[env] <= self.sync_interval:
            return 0, self.steps[env]
        return divmod(self.steps[env] - 1, self.sync_interval)


class OneFinishedIsEnough(Schedule):
    """A round counts as full as soon as the first environment has finished it."""

    def is_full(self, round_: int) -> bool:
        return max(self.steps) >= (round_ + 1) * self.sync_interval


class OneSlot(Schedule):
    """All rounds live in the same slot."""

    def slot(self, round_: int) -> int:
        return 0


class OpensAtLend(Schedule):
    """A round opens when the batch is handed out, not when the update is done."""

    def is_open(self, round_: int) -> bool:
        if self.last_round is not None and round_ >= self.last_round:
            return False
        return round_ <= self.learner[0] + self.lag


class Barrier(Schedule):
    """The paper's schedule: a round opens for everyone once all have finished the one before."""

    def is_open(self, round_: int) -> bool:
        return super().is_open(round_) and (round_ == 0 or self.is_full(round_ - 1))


class LendsTwice(Schedule):
    """The next full batch is lent while the learner still has one."""

    def lend(self) -> int:
        self.learner[0] += 1
        return self.learner[0] - 1


class NeverWaitsForTheOffer(Schedule):
    """An actor may take what has not been offered."""

    def _expect(self, env: int, phase: Phase, event: str) -> None:
        if event != "taken":
            super()._expect(env, phase, event)


class EndsEarly(Schedule):
    """The last round never opens."""

    def is_open(self, round_: int) -> bool:
        return super().is_open(round_ + 1) if round_ == 3 else super().is_open(round_)


class KeepsWhatWasTaken(Schedule):
    """What a failed actor held stays taken."""

    def recover(self, lost: Iterable[int]) -> None:
        taken = [env for env in range(self.num_envs) if self.phase[env] == Phase.TAKEN]
        super().recover(lost)
        for env in taken:
            self.phase[env] = Phase.TAKEN


class GoesOnWithTheOldAction(Schedule):
    """The action for the observation of the executor that failed is kept for the new one."""

    def recover(self, lost: Iterable[int]) -> None:
        lost = set(lost)
        super().recover(env for env in lost if self.phase[env] != Phase.ANSWERED)


class CountsTheHalfStep(Schedule):
    """The transition that an executor failed in counts as finished."""

    def recover(self, lost: Iterable[int]) -> None:
        lost = set(lost)
        for env in lost:
            self.steps[env] += self.phase[env] == Phase.ANSWERED
        super().recover(lost)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (KeepsWhatWasTaken, "I4|was allowed"),
        (GoesOnWithTheOldAction, "was allowed"),
        (CountsTheHalfStep, "I1"),
    ],
)
def test_the_exploration_finds_a_broken_recovery(broken: type[Schedule], found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        explore(World(broken(NUM_ENVS, ALPHA, 0, last_round=2)), failures=1)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (FirstRoundTooLong, "I1"),
        (OneFinishedIsEnough, "I1"),
        (OneSlot, "I5"),
        (OpensAtLend, "I4"),
        (Barrier, "I4"),
        (LendsTwice, "was allowed"),
        (NeverWaitsForTheOffer, "was allowed"),
        (EndsEarly, "I4"),
    ],
)
def test_the_exploration_finds_a_broken_schedule(broken: type[Schedule], found: str) -> None:
    """Each invariant's check can fail: these schedules uphold all but one."""
    begin = World(broken(NUM_ENVS, ALPHA, 1, last_round=4))
    with pytest.raises(AssertionError, match=found):
        explore(begin)
