"""When an executor announces what it has stepped: the learner's state and time made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from environments import EchoEnv
from policies import categorical
from probe import cores_of_executors

from torchrl_hts import HTSCollector
from torchrl_hts._executor import loop as executor
from torchrl_hts._processes.limits import available_cores
from torchrl_hts._rounds.exchange import STOP, ExecutorPort, Inbox
from torchrl_hts._rounds.inbox_reader import Clock, InboxReader
from torchrl_hts._rounds.schedule import Phase, Schedule
from torchrl_hts._rounds.shared_memory import Counter


class Announced:
    """In place of actors, which answer at once, and their inbox: keeps each message apart."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.messages: list[list[int]] = []

    def post(self, words: list[int]) -> None:
        self.messages.append([*words])
        self.schedule.take(words)
        self.schedule.answer(words)


class Environment:
    """Takes some time to step; what else is to happen during its step may be given."""

    rows = range(1)

    def __init__(self, pass_time: Callable[[], None]) -> None:
        self.pass_time = pass_time
        self.during_step: Callable[[], None] = lambda: None

    def write_observation(self, slot: int, t: int) -> None:
        pass

    def step(self, slot: int, t: int) -> bool:
        self.pass_time()
        self.during_step()
        return False


class Time:
    """A clock that stands still but for what takes time, all of which uses the processor."""

    def __init__(self) -> None:
        self.ns = 0
        self.step_us = 1000
        self.clock = Clock(lambda: self.ns, lambda: self.ns)

    def pass_us(self, microseconds: int) -> None:
        self.ns += 1000 * microseconds

    def step(self) -> None:
        """What a step takes."""
        self.pass_us(self.step_us)


class Turns:
    """In place of a reader: the actions of each turn, and how long they are waited for.

    Args:
        turns: for each, microseconds of waiting and the environments whose actions come.
        time: passes while it waits.
        a_core_each: whether everybody has a core.
    """

    def __init__(
        self, turns: list[tuple[int, list[int]]], time: Time, *, a_core_each: bool
    ) -> None:
        self.turns, self.time = turns, time
        self.a_core_each = a_core_each
        self.looking_ns = 0
        self.clock = time.clock

    def read(self) -> list[int]:
        if not self.turns:
            return [STOP]
        waited_us, envs = self.turns.pop(0)
        self.time.pass_us(waited_us)
        return envs


class World:
    """One executor with four answered environments, whose steps take long and use the processor."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.time = Time()
        self.schedule = Schedule(4, 5, 1, phase=[int(Phase.ANSWERED)] * 4)
        self.environments: dict[int, Any] = {env: Environment(self.time.step) for env in range(4)}
        self.counters = np.zeros(len(Counter), np.int64)
        self.counters[[Counter.BUSY_NS, Counter.CPU_NS]] = 1_000_000, 600_000
        self.announced = Announced(self.schedule)
        self.heard: list[int] = []  # by the learner

    def learn(self, learning: bool) -> None:
        """The learner has a batch, or has finished with it."""
        self.schedule.learner[0] = self.schedule.learner[1] + learning

    def serve(self, cores: int | None, turns: Turns | None = None) -> list[list[int]]:
        """Step each environment once, or in turns; returns what was announced, each message."""
        actors: Any = self.announced
        learner: Any = SimpleNamespace(post=self.heard.extend)
        reader: Any = turns or InboxReader(
            self.inbox, self.schedule, a_core_each=False, clock=self.time.clock
        )
        run = executor.StepLoop(
            self.environments,
            ExecutorPort(self.schedule, actors, learner, range(4)),
            reader,
            cores,
            self.counters.data,
            np.zeros(64, np.int64).data,
            None,
            None,  # type: ignore[arg-type]  # nothing is saved
        )
        self.inbox.post([0, 1, 2, 3, STOP])
        run.serve()
        return self.announced.messages


@pytest.fixture
def world() -> Iterator[World]:
    inbox = Inbox.create()
    yield World(inbox)
    inbox.close()


EACH, TOGETHER = [[0], [1], [2], [3]], [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("cores", "learning", "expected"),
    [
        (2, False, EACH),  # the actor has a core
        (2, True, TOGETHER),
        (3, True, EACH),
        (1, False, TOGETHER),
        (None, True, EACH),  # there are other actors
    ],
)
def test_the_actor_is_woken_for_each_step_where_it_has_a_core(
    cores: int | None, learning: bool, expected: list[list[int]], world: World
) -> None:
    world.learn(learning)
    assert world.serve(cores) == expected


@pytest.mark.parametrize("num_actors", [1, 2])
def test_an_executor_knows_how_many_cores_there_are(num_actors: int) -> None:
    options: dict[str, Any] = {"num_executors": 1, "num_actors": num_actors}
    with HTSCollector([EchoEnv] * 2, categorical(), frames_per_batch=4, **options) as collector:
        cores = ceil(available_cores()) if num_actors == 1 else None
        assert cores_of_executors(collector) == cores


def test_environments_that_sleep_are_announced_at_once(world: World) -> None:
    world.learn(True)
    world.counters[Counter.CPU_NS] = 10_000
    assert world.serve(2) == EACH


def test_what_was_held_back_is_announced_when_the_learner_is_done(world: World) -> None:
    world.learn(True)
    world.environments[1].during_step = lambda: world.learn(False)
    assert world.serve(2) == [[0, 1], [2], [3]]


def test_the_learner_hears_of_a_round_before_the_actors_hear_of_what_follows(world: World) -> None:
    """Of the last environment, which it may wait for; the next step may be a long one."""
    world.learn(True)
    for env in range(4):
        world.schedule.steps[env] = world.schedule.sync_interval - (env == 0)
    heard: list[list[int]] = []
    world.environments[1].during_step = lambda: heard.append([*world.heard])
    assert world.serve(2) == TOGETHER
    assert heard == [[0]]


ALL, FIRST, SECOND = [0, 1, 2, 3], [0, 1], [2, 3]


@pytest.mark.parametrize(
    ("first", "waited_us", "a_core_each", "learning", "expected"),
    [
        # A step takes 10 us. Nothing is known before the first turn, so all together.
        (ALL, 39, True, False, [ALL, FIRST, SECOND]),
        (FIRST, 39, True, False, [FIRST, FIRST, SECOND]),
        (ALL, 40, True, False, [ALL, ALL]),
        (ALL, 39, False, False, [ALL, ALL]),
        (ALL, 39, True, True, [ALL, ALL]),  # the learner and the executor fill both cores
    ],
)
def test_half_are_announced_first_where_everybody_has_a_core_and_passes_are_short(
    first: list[int],
    waited_us: int,
    a_core_each: bool,
    learning: bool,
    expected: list[list[int]],
    world: World,
) -> None:
    world.time.step_us = 10  # no step takes long
    reader = Turns([(1000, first), (waited_us, ALL)], world.time, a_core_each=a_core_each)
    world.learn(learning)
    assert world.serve(2, reader) == expected
