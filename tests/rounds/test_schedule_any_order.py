"""The schedule under any order of events, in step with the reference."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from schedule_reference import World, arbitrary_events, expected_values, words

from torchrl_hts._rounds.schedule import Schedule


class ScheduleMachine(RuleBasedStateMachine):
    """Every order of legal and illegal events, in step with the reference (I1 to I5)."""

    ACTORS = 3

    @initialize(
        num_envs=st.integers(1, 4),
        sync_interval=st.integers(1, 4),
        lag=st.integers(0, 3),
        last_round=st.none() | st.integers(1, 6),
    )
    def begin(self, num_envs: int, sync_interval: int, lag: int, last_round: int | None) -> None:
        schedule = Schedule(num_envs, sync_interval, lag, last_round=last_round)
        self.world = World(schedule, self.ACTORS)
        self.any = list(arbitrary_events(num_envs, self.ACTORS))
        self.any += [("take", 0, (env, env)) for env in range(num_envs)]
        self.any += [("answer", (env, env)) for env in range(num_envs)]

    @precondition(lambda self: self.world.enabled())
    @rule(choices=st.lists(st.integers(0, 2**16), min_size=1, max_size=20))
    def work(self, choices: list[int]) -> None:
        """The workers do something, in any order."""
        for choice in choices:
            events = self.world.enabled()
            if not events:
                break
            self.world.apply(events[choice % len(events)])

    @rule(choice=st.integers(0, 2**16))
    def anything(self, choice: int) -> None:
        """Any event at all: the schedule allows it if and only if the method does."""
        event = self.any[choice % len(self.any)]
        if self.world.legal(event):
            self.world.apply(event)
        else:
            self.world.refuse(event)

    @rule(env=st.integers(0, 3))
    def rush(self, env: int) -> None:
        """One environment goes as far as it may, whatever the others do: to the end of what is
        open, which doesn't depend on them (I4)."""
        world = self.world
        env %= world.num_envs
        while True:
            for event in (("offer", env), ("take", 0, (env,)), ("answer", (env,))):
                if world.legal(event):
                    world.apply(event)
            if world.holder[env] != "answered":
                break
            world.apply(("finish_step", env))
        assert not world.opened(world.round(env))

    @rule()
    def learn(self) -> None:
        """The learner takes a batch, or is done with the one it has."""
        event = ("release",) if self.world.lent is not None else ("lend",)
        if self.world.legal(event):
            self.world.apply(event)

    @rule()
    def restart(self) -> None:
        """All workers come to rest and go on where the learner is."""
        self.world.restart()

    @rule(lost=st.frozensets(st.integers(0, 3)))
    def fail(self, lost: frozenset[int]) -> None:
        """Any executors fail, and the actors that hold something; then they are replaced."""
        self.world.apply(("recover", tuple(env for env in lost if env < self.world.num_envs)))

    @rule()
    def resume(self) -> None:
        """All that is open becomes full; from there a restart gives the very same words."""
        for env in range(self.world.num_envs):
            self.rush(env)
        schedule = self.world.schedule
        lent = schedule.lent > schedule.released
        ahead = schedule.position(0)[0] - schedule.lent
        before = words(schedule)
        schedule.restart(schedule.lent, lent=lent, ahead=ahead)
        assert words(schedule) == before

    @invariant()
    def learned_as_the_method_says(self) -> None:
        """I3: the newest parameters are those of docs/explanation/schedule.md."""
        world = self.world
        values = expected_values(world.num_envs, world.sync_interval, world.lag, world.updates)
        assert world.newest == values[-1]


def test_any_order_of_events() -> None:
    """I1 to I5 in every state that events in any order lead to."""
    run_state_machine_as_test(
        ScheduleMachine,
        settings=settings(
            max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
        ),
    )
