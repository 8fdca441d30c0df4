"""Waiting and waking: many threads at once, by counting."""

from __future__ import annotations

import queue
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
from exchange_parts import envs_of, inboxes, serve_executor

from torchrl_hts._rounds.exchange import STOP, ExecutorPort, Inbox, LearnerPort
from torchrl_hts._rounds.schedule import Schedule


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let the interpreter switch threads some hundred times as often as it does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Run:
    """Executors, actors and a learner, each a thread, with their slots and counts."""

    def __init__(
        self, owner: Sequence[int], num_actors: int, alpha: int, lag: int, rounds: int
    ) -> None:
        n, num_slots = len(owner), lag + 1
        self.owner = owner
        self.num_actors = num_actors
        self.rounds = rounds
        self.words = {
            "steps": memoryview(bytearray(8 * n)).cast("q"),
            "phase": memoryview(bytearray(n)),
            "learner": memoryview(bytearray(16)).cast("q"),
        }
        self.sizes = n, alpha, lag
        self.parameters = list(range(num_slots))
        self.slots = [[[-1] * alpha for _ in owner] for _ in range(num_slots)]
        self.lent_slot: int | None = None
        self.taken: Counter[tuple[int, int, int]] = Counter()  # each key has one writer
        self.failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.inboxes: list[Inbox] = []

    def schedule(self) -> Schedule:
        """A schedule of one's own over the shared words."""
        return Schedule(*self.sizes, last_round=self.rounds, **self.words)

    def executor(self, index: int) -> None:
        """Steps its environments: checks that each action was computed with this round's."""
        envs = envs_of(self.owner, index)
        port = ExecutorPort(self.schedule(), self.actors, self.learner_inbox, envs)
        schedule = port.schedule

        def offer(env: int) -> None:
            round_, t = schedule.position(env)
            slot = schedule.slot(round_)
            assert slot != self.lent_slot, "I5: written while lent"
            self.slots[slot][env][t] = -1  # the observation
            port.pass_on(env)

        def step(env: int) -> bool:
            round_, t = schedule.position(env)
            assert self.slots[schedule.slot(round_)][env][t] == round_, "I2: other parameters"
            self.taken[env, round_, t] += 1
            return port.finish_step(env)

        for env in envs:
            if port.go_on_or_park(env):
                offer(env)
        port.flush()
        serve_executor(port, self.executor_inboxes[index], offer, step)

    def actor(self) -> None:
        """Answers with the version of the slot's parameters."""
        schedule = self.schedule()
        while True:
            words = self.actors.read()
            stops = words.count(STOP)
            if stops:
                if stops > 1:
                    self.actors.post([STOP] * (stops - 1))
                return
            schedule.take(words)
            answers: dict[int, list[int]] = {}
            for env in words:
                round_, t = schedule.position(env)
                slot = schedule.slot(round_)
                self.slots[slot][env][t] = self.parameters[slot]
                answers.setdefault(self.owner[env], []).append(env)
            schedule.answer(words)
            for executor, envs in answers.items():
                self.executor_inboxes[executor].post(envs)

    def learn(self, port: LearnerPort, deadline: float) -> None:
        """The learner: waits for each batch, checks it and makes the next parameters."""
        n, alpha, lag = self.sizes
        poll = select.poll()
        poll.register(self.learner_inbox.read_fd, select.POLLIN)
        for round_ in range(self.rounds):
            port.hear()
            while not port.has_heard_all(round_):
                poll.poll(100)  # to look after the failures in between
                port.hear()
                if not self.failures.empty():
                    raise self.failures.get()
                assert time.monotonic() < deadline, f"all asleep in round {round_}: {self.words}"
            assert port.schedule.lend() == round_
            slot = port.schedule.slot(round_)
            self.lent_slot = slot
            batch = [list(row) for row in self.slots[slot]]
            assert batch == [[round_] * alpha] * n, "I1, I2: a full round, all with theta_j"
            assert self.slots[slot] == batch, "I5: a lent batch was overwritten"
            self.slots[slot] = [[-1] * alpha for _ in range(n)]
            self.parameters[slot] = round_ + lag + 1
            self.lent_slot = None
            port.open_next_round()

    def run(self, timeout_s: float) -> None:
        """Everybody at once; raises the first failure of any."""
        num_executors = max(self.owner) + 1
        with inboxes(2 + num_executors) as made:
            self.actors, self.learner_inbox, *self.executor_inboxes = made
            port = LearnerPort(
                self.schedule(), self.learner_inbox, self.executor_inboxes, self.owner
            )
            works: list[Callable[[], None]] = [self.actor] * self.num_actors
            works += [partial(self.executor, index) for index in range(num_executors)]
            threads = [threading.Thread(target=self._guard, args=(w,), daemon=True) for w in works]
            for thread in threads:
                thread.start()
            try:
                self.learn(port, time.monotonic() + timeout_s)
            finally:
                for inbox in self.executor_inboxes:
                    inbox.post([STOP])
                self.actors.post([STOP] * self.num_actors)
                for thread in threads:
                    thread.join(timeout_s)
            assert not any(thread.is_alive() for thread in threads)
            assert self.failures.empty(), self.failures.get()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failures.put(error)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("owner", "num_actors", "alpha", "lag"),
    [
        ((0, 0, 0, 1, 1, 2, 3), 3, 3, 1),  # executors with 3, 2, 1 and 1 environments
        ((0, 1, 2, 3, 4), 2, 1, 0),
        ((0, 0, 0, 0), 4, 2, 3),
    ],
)
def test_many_threads(owner: tuple[int, ...], num_actors: int, alpha: int, lag: int) -> None:
    """I1, I2, I5: every (environment, round, step) exactly once, with theta_j, under real load."""
    rounds = 500
    run = Run(owner, num_actors, alpha, lag, rounds)
    with short_switch_interval():
        run.run(timeout_s=30)
    each = [(i, j, t) for i in range(len(owner)) for j in range(rounds) for t in range(alpha)]
    assert run.taken == Counter(each)
    schedule = run.schedule()
    assert [schedule.position(env) for env in range(len(owner))] == [(rounds, 0)] * len(owner)
    assert (schedule.lent, schedule.released) == (rounds, rounds)
