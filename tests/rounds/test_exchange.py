"""Waiting and waking: inboxes over real pipes, and the ports, one event at a time."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Sequence

import pytest
from exchange_parts import envs_of, inboxes

from torchrl_hts._rounds.exchange import MAX_ENVS, STOP, WAKE, ExecutorPort, Inbox, LearnerPort
from torchrl_hts._rounds.schedule import Schedule

# Inboxes, over real pipes.


def test_words_arrive_in_order_and_all_at_once() -> None:
    """One read returns all that was posted, in order, codes included."""
    with inboxes(1) as (inbox,):
        inbox.post([3, 1])
        inbox.post([2, WAKE])
        inbox.post(iter([MAX_ENVS - 1, 0, STOP]))
        assert inbox.read().tolist() == [3, 1, 2, WAKE, MAX_ENVS - 1, 0, STOP]


def test_codes_are_no_environments() -> None:
    """Every environment's index is smaller than every code."""
    assert MAX_ENVS <= STOP < WAKE < 1 << 16


def test_read_ready_never_waits() -> None:
    """It returns nothing from an empty inbox, and all that there is from another."""
    with inboxes(1) as (inbox,):
        assert inbox.read_ready() == array("H")
        inbox.post([5])
        inbox.post([6, 7])
        assert inbox.read_ready().tolist() == [5, 6, 7]
        assert inbox.read_ready() == array("H")


def test_read_ready_ends_when_every_writer_is_gone() -> None:
    """A pipe without a writer always looks readable; what was posted before isn't lost."""
    reader = Inbox.create()
    reader.post([4])
    os.close(reader.write_fd)
    reader.write_fd = -1
    assert reader.read_ready().tolist() == [4]
    assert reader.read_ready() == array("H")
    reader.close()


def test_read_wakes_up_when_something_is_posted() -> None:
    """A reader may be asleep already, or not yet: it gets the words either way."""
    with inboxes(2) as (there, back):
        echo = threading.Thread(target=lambda: back.post(there.read()), daemon=True)
        echo.start()
        there.post([9, 8])
        assert back.read().tolist() == [9, 8]
        echo.join(10)
        assert not echo.is_alive()


def test_several_readers_share_an_inbox() -> None:
    """Every word reaches exactly one reader, and what one post said stays together."""
    messages, size, readers = 400, 5, 3
    with inboxes(1) as (inbox,):
        taken: list[list[array[int]]] = [[] for _ in range(readers)]

        def read(mine: list[array[int]]) -> None:
            while True:
                words = inbox.read()
                stops = words.count(STOP)
                mine.append(array("H", [word for word in words if word != STOP]))
                if stops:
                    if stops > 1:
                        inbox.post([STOP] * (stops - 1))
                    return

        threads = [threading.Thread(target=read, args=(mine,), daemon=True) for mine in taken]
        for thread in threads:
            thread.start()
        for message in range(messages):
            inbox.post(range(message * size, (message + 1) * size))
        inbox.post([STOP] * readers)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        together = [word for mine in taken for words in mine for word in words]
        assert sorted(together) == list(range(messages * size))
        for mine in taken:
            for words in mine:
                assert words.tolist() == [
                    start + k for start in words[::size] for k in range(size)
                ]  # whole messages


def test_close_may_be_called_again() -> None:
    """It closes each end once, and only the ends that this side has."""
    inbox = Inbox.create()
    ends = inbox.read_fd, inbox.write_fd
    reader = Inbox(os.dup(inbox.read_fd), -1)
    inbox.close()
    inbox.close()
    for fd in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    reader.close()
    reader.close()
    assert (reader.read_fd, reader.write_fd) == (-1, -1)


# The two ports, one event at a time.


class Ports:
    """A schedule with its ports and inboxes.

    Args:
        schedule: over words that all ports share.
        owner: for each environment, the index of its executor.
        made: inboxes of the actors, the learner and each executor.
    """

    def __init__(self, schedule: Schedule, owner: Sequence[int], made: Sequence[Inbox]) -> None:
        self.schedule = schedule
        self.actors, self.learner_inbox, *self.executor_inboxes = made
        self.executors = [
            ExecutorPort(schedule, self.actors, self.learner_inbox, envs_of(owner, index))
            for index in range(len(self.executor_inboxes))
        ]
        self.learner = LearnerPort(schedule, self.learner_inbox, self.executor_inboxes, owner)
        self.owner = owner

    def step(self, env: int) -> bool:
        """One transition of an environment that may go on; returns whether it still may."""
        port = self.executors[self.owner[env]]
        port.pass_on(env)
        self.schedule.take([env])
        self.schedule.answer([env])
        return port.finish_step(env)

    def flush(self) -> None:
        """Every executor tells what it has to tell."""
        for port in self.executors:
            port.flush()


def test_flush_tells_the_actors_once() -> None:
    """All that was offered since the last flush, in one message, and nothing if nothing was."""
    with inboxes(3) as made:
        ports = Ports(Schedule(3, 2, 1), (0, 0, 0), made)
        (executor,) = ports.executors
        executor.pass_on(2)
        executor.pass_on(0)
        assert ports.actors.read_ready() == array("H")
        executor.flush()
        executor.flush()
        assert ports.actors.read_ready().tolist() == [2, 0]
        executor.flush()
        assert ports.actors.read_ready() == array("H")


def test_the_learner_hears_of_rounds_not_of_steps() -> None:
    """I1: one message per environment and round; all are heard only when each has come."""
    with inboxes(4) as made:
        ports = Ports(Schedule(2, 2, 1), (0, 1), made)
        assert [ports.step(0) for _ in range(3)] == [True] * 3
        ports.step(1)
        ports.flush()
        ports.learner.hear()
        assert not ports.learner.has_heard_all(0)
        ports.step(1)
        ports.flush()
        assert not ports.learner.has_heard_all(0)  # not taken in yet
        ports.learner.hear()
        assert ports.learner.has_heard_all(0)
        assert not ports.learner.has_heard_all(1)
        assert ports.learner.schedule.lend() == 0


def test_the_learner_hears_of_a_round_when_the_last_environment_has_finished_it() -> None:
    """I4: at once, since it may wait for that; before the last, at a flush or when one parks."""
    with inboxes(3) as made:
        ports = Ports(Schedule(2, 1, 2), (0, 0), made)
        heard = ports.learner_inbox.read_ready
        assert ports.step(0)
        assert heard() == array("H")
        assert ports.step(1)
        assert heard().tolist() == [0, 1]
        assert ports.step(1)
        ports.flush()
        assert heard().tolist() == [1]
        assert not ports.step(1)  # round 3 is not open
        assert heard().tolist() == [1]
        assert ports.step(0)
        assert heard().tolist() == [0]
        ports.flush()
        assert heard() == array("H")


def test_only_executors_with_parked_environments_are_woken() -> None:
    """I4: whoever still has an open round is left alone; the others hear of the opening once."""
    with inboxes(5) as made:
        ports = Ports(Schedule(4, 1, 1), (0, 0, 1, 2), made)
        for env in range(4):
            assert ports.step(env)
        assert [ports.step(env) for env in (0, 1, 3)] == [False] * 3
        assert [port.parked for port in ports.executors] == [{0, 1}, set(), {3}]
        ports.learner.hear()
        ports.learner.schedule.lend()
        ports.learner.open_next_round()
        woken = [inbox.read_ready().tolist() for inbox in ports.executor_inboxes]
        assert woken == [[WAKE], [], [WAKE]]
        assert [ports.executors[0].go_on_or_park(env) for env in (0, 1)] == [True, True]
        assert ports.executors[0].parked == set()


def test_nobody_is_woken_for_a_round_that_never_opens() -> None:
    """I4: after the last round everyone stays asleep."""
    with inboxes(3) as made:
        ports = Ports(Schedule(1, 1, 0, last_round=1), (0,), made)
        assert not ports.step(0)
        ports.learner.hear()
        ports.learner.schedule.lend()
        ports.learner.open_next_round()
        assert ports.executor_inboxes[0].read_ready() == array("H")
        assert not ports.executors[0].go_on_or_park(0)


@pytest.mark.parametrize("lag", range(3))
def test_restart_with_a_batch_lent(lag: int) -> None:
    """I5: with lag 0 the environments wait for the lent batch, and are woken by its release."""
    schedule = Schedule(2, 1, lag)
    schedule.restart(3, lent=True)
    with inboxes(3) as made:
        ports = Ports(schedule, (0, 0), made)
        (executor,) = ports.executors
        assert [executor.go_on_or_park(env) for env in (0, 1)] == [lag > 0] * 2
        ports.learner.open_next_round()
        assert ports.executor_inboxes[0].read_ready().tolist() == ([] if lag else [WAKE])
        assert executor.go_on_or_park(0)
        ports.step(0)
        ports.learner.hear()
        assert not ports.learner.has_heard_all(3)


def test_restart_with_full_rounds_ahead() -> None:
    """Rounds that are full already are full for the learner's port, and wake-ups go on as ever."""
    schedule = Schedule(2, 1, lag=2)
    schedule.restart(3, ahead=2)
    with inboxes(3) as made:
        ports = Ports(schedule, (0, 0), made)
        ports.learner.count_anew(ahead=2)
        assert [ports.learner.has_heard_all(round_) for round_ in (3, 4, 5)] == [True, True, False]
        (executor,) = ports.executors
        assert [executor.go_on_or_park(env) for env in (0, 1)] == [True] * 2
        for env in (0, 1):
            assert not ports.step(env)
        ports.learner.schedule.lend()
        ports.learner.open_next_round()
        assert ports.executor_inboxes[0].read_ready().tolist() == [WAKE]
