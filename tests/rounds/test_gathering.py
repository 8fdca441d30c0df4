"""How long an actor waits for more observations, with every change of state made by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from torchrl_hts._rounds.exchange import STOP, Inbox
from torchrl_hts._rounds.gathering import Gatherer
from torchrl_hts._rounds.inbox_reader import InboxReader
from torchrl_hts._rounds.schedule import Phase, Schedule
from torchrl_hts._rounds.shared_memory import Counter

OWNER = (0, 0, 1, 1)  # two executors of two environments
LONG = 10**12  # more patience than any test has


class World:
    """Four environments of two executors that compute, one actor, the learner; nothing runs."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.phase: npt.NDArray[np.int8] = np.zeros(4, np.int8)
        self.schedule = Schedule(4, 5, 1, phase=self.phase.data)
        self.counters = np.zeros((3, len(Counter)), np.int64)
        self.counters[:2, Counter.BUSY_NS] = 1_000
        self.counters[:2, Counter.CPU_NS] = 600

    def gatherer(self, cores: int | None) -> Gatherer:
        reader = InboxReader(self.inbox, self.schedule, a_core_each=False)
        return Gatherer(reader, OWNER, self.counters, cores)

    def answered(self, *envs: int) -> None:
        """These have an action to step with; all others wait to be served."""
        self.phase[:] = Phase.READY
        self.phase[list(envs)] = Phase.ANSWERED

    def learn(self) -> None:
        """The learner works on a batch."""
        self.schedule.learner[0] = self.schedule.learner[1] + 1


@pytest.fixture
def world() -> Iterator[World]:
    inbox = Inbox.create()
    yield World(inbox)
    inbox.close()


def test_cores_are_filled_by_executors_with_work_and_the_learner(world: World) -> None:
    gatherer = world.gatherer(cores=2)
    world.answered(0, 3)
    assert gatherer.every_core_is_busy()
    world.answered(0, 1)  # executor 1 has run dry
    assert not gatherer.every_core_is_busy()
    world.learn()
    assert gatherer.every_core_is_busy()
    world.answered()
    assert not gatherer.every_core_is_busy()


def test_with_a_core_to_spare_nothing_is_waited_for(world: World) -> None:
    world.answered(0, 3)
    world.learn()
    assert world.gatherer(cores=3).every_core_is_busy()
    assert not world.gatherer(cores=4).every_core_is_busy()


def test_when_no_more_can_come_nothing_is_waited_for(world: World) -> None:
    gatherer = world.gatherer(cores=1)
    world.learn()
    world.answered(0)
    assert gatherer.every_core_is_busy()
    world.answered()
    assert not gatherer.every_core_is_busy()


def test_an_executor_that_sleeps_leaves_its_core_to_others(world: World) -> None:
    gatherer = world.gatherer(cores=2)
    world.answered(0, 3)
    world.counters[1, Counter.CPU_NS] = 10
    assert not gatherer.every_core_is_busy()
    world.counters[1] = 0  # nothing known yet
    assert not gatherer.every_core_is_busy()


def test_executors_that_begin_to_compute_are_found_soon(world: World) -> None:
    gatherer = world.gatherer(cores=2)
    world.answered(0, 3)
    world.counters[:2, Counter.CPU_NS] = 10
    assert not gatherer.every_core_is_busy()
    world.counters[:2, Counter.CPU_NS] = 600
    assert any(gatherer.every_core_is_busy() for _ in range(20))
    world.counters[1, Counter.CPU_NS] = 10  # seen at once: nobody is waited for in vain
    assert not gatherer.every_core_is_busy()


def test_one_of_several_actors_does_not_wait(world: World) -> None:
    world.answered(0, 3)
    world.learn()
    assert not world.gatherer(cores=None).every_core_is_busy()


def test_what_comes_while_it_waits_is_taken_together(world: World) -> None:
    """It waits while both executors have work, and no longer."""
    world.answered(0, 3)
    world.inbox.post([1])
    taken: list[list[int]] = []
    gatherer = world.gatherer(cores=2)
    looks = threading.Semaphore(0)
    busy = gatherer.every_core_is_busy

    def look() -> bool:
        looks.release()
        return busy()

    gatherer.every_core_is_busy = look  # type: ignore[method-assign]
    thread = threading.Thread(
        target=lambda: taken.append(gatherer.gather(LONG).tolist()), daemon=True
    )
    thread.start()
    for _ in range(3):  # it has looked several times, and is still there
        assert looks.acquire(timeout=10)
    assert not taken
    world.inbox.post([2])
    world.phase[3] = Phase.READY  # executor 1 has run dry
    world.inbox.post([3])
    thread.join(10)
    assert sorted(taken[0] + gatherer.inbox.read_ready().tolist()) == [1, 2, 3]
    assert taken[0][:2] == [1, 2]


def test_it_looks_again_where_nothing_is_announced(world: World) -> None:
    """An environment that was parked is not offered: nobody writes to the inbox then."""
    world.answered(0, 3)
    world.inbox.post([1])
    gatherer = world.gatherer(cores=2)
    looked = threading.Event()
    busy = gatherer.every_core_is_busy

    def look() -> bool:
        result = busy()
        looked.set()
        return result

    gatherer.every_core_is_busy = look  # type: ignore[method-assign]
    taken: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: taken.append(gatherer.gather(LONG).tolist()), daemon=True
    )
    thread.start()
    assert looked.wait(10)
    world.phase[3] = Phase.IDLE
    thread.join(10)
    assert taken == [[1]]


@pytest.mark.parametrize("patience_ns", [0, 1, 2_500_000])
def test_patience_ends(world: World, patience_ns: int) -> None:
    """What looks like work may be an environment that waits for the row which the actor holds."""
    world.answered(0, 3)
    world.learn()
    world.inbox.post([1])
    gatherer = world.gatherer(cores=2)
    assert gatherer.gather(patience_ns).tolist() == [1]
    assert gatherer.every_core_is_busy()


def test_a_stop_ends_the_wait(world: World) -> None:
    world.answered(0, 3)
    world.inbox.post([1, STOP])
    assert world.gatherer(cores=2).gather(LONG).tolist() == [1, STOP]


def test_the_end_of_the_inbox_ends_the_wait(world: World) -> None:
    world.answered(0, 3)
    world.inbox.post([1])
    gatherer = world.gatherer(cores=2)
    writer = Inbox(-1, world.inbox.write_fd)
    world.inbox.write_fd = -1
    writer.close()
    with pytest.raises(EOFError, match="nobody is left"):
        gatherer.gather(LONG)
