"""Who makes no progress, by the words that workers share."""

from __future__ import annotations

import numpy as np

from torchrl_hts._rounds.schedule import Phase, Schedule
from torchrl_hts._rounds.shared_memory import Counter
from torchrl_hts._supervision.progress import ProgressWatch, at_work
from torchrl_hts.errors import WorkerId

EXECUTORS = [WorkerId("executor", index) for index in range(2)]
ACTORS = [WorkerId("actor", index) for index in range(2)]


def test_at_work() -> None:
    schedule = Schedule(3, 1, 0)
    counters = np.zeros((4, len(Counter)), np.int64)  # 2 executors, 2 actors
    owner = (0, 0, 1)
    assert set(at_work(schedule, counters, owner)) == {*EXECUTORS}
    for env in range(3):
        schedule.offer(env)
    idle = at_work(schedule, counters, owner)
    assert set(idle) == {*ACTORS}
    counters[3, Counter.EVENTS] += 1  # progress of one is progress of those that wait
    later = at_work(schedule, counters, owner)
    assert all(later[worker] != idle[worker] for worker in idle)

    schedule.take([0])
    counters[3, Counter.AT] = 1  # an actor has something in hand, and maybe hangs
    schedule.take([2])
    schedule.answer([2])
    working = at_work(schedule, counters, owner)
    assert set(working) == {EXECUTORS[1], ACTORS[1]}, "an idle actor is not to blame"
    counters[3, Counter.EVENTS] += 1
    after = at_work(schedule, counters, owner)
    assert after[ACTORS[1]] != working[ACTORS[1]]
    assert after[EXECUTORS[1]] == working[EXECUTORS[1]]
    schedule.answer([0])
    counters[3, Counter.AT] = 0
    assert set(at_work(schedule, counters, owner)) == {*EXECUTORS, *ACTORS}


def test_an_actor_owes_nothing_that_may_not_have_been_announced() -> None:
    schedule = Schedule(2, 5, 1, phase=[int(Phase.READY), int(Phase.ANSWERED)])
    counters = np.zeros((2, len(Counter)), np.int64)
    counters[0, Counter.AT] = 2  # in the midst of a step of environment 1
    assert set(at_work(schedule, counters, (0, 0))) == {EXECUTORS[0]}
    schedule.phase[1] = Phase.READY
    counters[0, Counter.AT] = 0
    assert set(at_work(schedule, counters, (0, 0))) == {ACTORS[0]}


def test_nobody_owes_anything_in_a_round_that_is_not_open() -> None:
    schedule = Schedule(1, 1, 0)
    schedule.offer(0)
    schedule.take([0])
    schedule.answer([0])
    schedule.finish_step(0)
    assert schedule.phase[0] == Phase.IDLE
    assert at_work(schedule, np.zeros((2, len(Counter)), np.int64), (0,)) == {}


def test_a_kind_without_a_time_out_may_take_any_time() -> None:
    watch = ProgressWatch({"actor": 1.0})
    for now in (0.0, 100.0):
        assert watch.overdue({EXECUTORS[0]: 1}, now) is None
    assert watch.interval_s == 1 / 8
    assert ProgressWatch({}).interval_s is None


def test_what_was_settled_counts_anew() -> None:
    watch = ProgressWatch({"actor": 1.0})
    watch.overdue({ACTORS[0]: 1}, 0.0)
    watch.overdue({}, 0.5)
    assert watch.overdue({ACTORS[0]: 1}, 1.5) is None
    assert watch.overdue({ACTORS[0]: 1}, 2.5) == ACTORS[0]
