"""Waiting and waking: every interleaving of the ports, and a failure at any operation."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import pytest
from exchange_parts import envs_of, serve_executor
from interleavings import End, Machine, Program, explore, mortal
from schedule_reference import words

from torchrl_hts._rounds.exchange import ExecutorPort, Inbox, LearnerPort
from torchrl_hts._rounds.schedule import Phase, Schedule
from torchrl_hts.errors import ProtocolError

# What workers do with their ports.


def executor_program(
    index: int,
    *,
    starts: Sequence[int] = (),
    finishes: Sequence[int] = (),
    port_type: type[ExecutorPort] = ExecutorPort,
) -> Program:
    """An executor that starts or finishes the step of its environments, then serves its inbox.

    With neither it has one, of its own index.
    """

    def program(machine: Machine) -> None:
        port = port_type(
            machine.schedule(),
            machine.inbox("actors"),
            machine.inbox("learner"),
            [*starts, *finishes] or [index],
        )

        def step(env: int) -> bool:
            goes_on = port.finish_step(env)
            machine.note("goes on" if goes_on else "parks")
            return goes_on

        for env in starts:
            if port.go_on_or_park(env):
                port.pass_on(env)
        for env in finishes:
            if step(env):
                port.pass_on(env)
        port.flush()
        serve_executor(
            port,
            machine.inbox(f"executor {index}"),
            port.pass_on,
            step,
            lambda: machine.note("is woken" if port.parked else "is woken for nothing"),
        )

    return program


def actor_program(owner: Sequence[int]) -> Program:
    """An actor that answers whatever is ready."""

    def program(machine: Machine) -> None:
        schedule = machine.schedule()
        while True:
            for env in machine.inbox("actors").read():
                schedule.take([env])
                schedule.answer([env])
                machine.inbox(f"executor {owner[env]}").post([env])

    return program


def learner_program(
    owner: Sequence[int],
    *,
    lent: bool = False,
    updates: int = 0,
    port_type: type[LearnerPort] = LearnerPort,
) -> Program:
    """A learner that releases the batch that it has, then does some updates."""

    def program(machine: Machine) -> None:
        schedule = machine.schedule()
        executors = [machine.inbox(f"executor {index}") for index in range(max(owner) + 1)]
        port = port_type(schedule, machine.inbox("learner"), executors, owner)
        if lent:
            port.open_next_round()
        for _ in range(updates):
            round_ = schedule.lent
            while not port.has_heard_all(round_):
                machine.sleep("learner")
                port.hear()
            port.schedule.lend()
            port.open_next_round()

    return program


def pipes_of(owner: Sequence[int], learner: Sequence[int] = ()) -> dict[str, list[int]]:
    """The names of all pipes, empty but the learner's."""
    executors: dict[str, list[int]] = {f"executor {index}": [] for index in range(max(owner) + 1)}
    return {"actors": [], "learner": list(learner), **executors}


# Every interleaving of finishing a round with opening the next.


def finishing(schedule: Schedule, lent: bool) -> Schedule:
    """Put every environment at the last step of the last open round, its action in its row."""
    schedule.restart(1 if lent else 0, lent=lent)
    for env in range(schedule.num_envs):
        schedule.steps[env] = (schedule.lag + 1) * schedule.sync_interval - 1
        schedule.phase[env] = Phase.ANSWERED
    return schedule


def race(
    *,
    lag: int,
    owner: Sequence[int] = (0,),
    lent: bool = True,
    executor_type: type[ExecutorPort] = ExecutorPort,
    learner_type: type[LearnerPort] = LearnerPort,
) -> tuple[list[End], int]:
    """Every environment finishes its round while the learner opens the next."""
    executors = [
        executor_program(index, finishes=envs_of(owner, index), port_type=executor_type)
        for index in range(max(owner) + 1)
    ]
    learner = learner_program(owner, lent=lent, updates=1 - lent, port_type=learner_type)
    # What the executors have said of the rounds before.
    said = [env for env in range(len(owner)) for _ in range(lag - lent)]
    begin = finishing(Schedule(len(owner), 2, lag), lent)
    return explore([*executors, learner], begin, pipes_of(owner, said))


def assert_everyone_goes_on(ends: list[End]) -> None:
    """I4: each environment is offered exactly once, in every interleaving: no wake-up is lost."""
    assert ends
    for end in ends:
        n = len(end.words["phase"])
        assert end.words["phase"] == [Phase.READY] * n, "an environment sleeps for ever"
        assert sorted(end.pipes["actors"]) == list(range(n)), "offered once each"
        assert end.returned[-1], "the learner sleeps for ever"


def test_the_explorer_goes_through_all_interleavings() -> None:
    """Three operations and four have (3 + 4)! / 3! 4! orders, and every result of them is found."""

    def add(times: int) -> Program:
        def program(machine: Machine) -> None:
            words = machine.schedule().learner
            for _ in range(times):
                words[0] = words[0] + 1  # two operations
            if times == 1:
                words[1] = 1

        return program

    ends, states = explore([add(1), add(2)], Schedule(1, 1, 0), pipes_of((0,)))
    assert sum(end.ways for end in ends) == 35
    assert states > 4 * 5
    assert {end.words["learner"][0] for end in ends} == {1, 2, 3}


# Half the number of states that there are at present: the exploration can't silently become empty.
@pytest.mark.parametrize(
    ("lag", "lent", "owner", "at_least"),
    [
        (0, False, (0,), 50),
        (1, True, (0,), 75),
        (1, False, (0,), 250),
        (2, True, (0,), 100),
        (1, True, (0, 0), 300),
        (1, True, (0, 1), 3000),
    ],
)
def test_no_wake_up_is_lost(lag: int, lent: bool, owner: tuple[int, ...], at_least: int) -> None:
    """I4: finishing a round against opening the next, every access to memory in any order."""
    ends, states = race(lag=lag, lent=lent, owner=owner)
    assert states >= at_least
    assert_everyone_goes_on(ends)
    if len(owner) == 1:
        # A WAKE to an executor that has nothing parked does happen, and is harmless.
        assert {end.notes[0] for end in ends} == {
            ("goes on",),
            ("goes on", "is woken for nothing"),
            ("parks", "is woken"),
        }


@pytest.mark.parametrize("owner", [(0,), (0, 0), (0, 1)])
def test_no_wake_up_is_lost_at_the_start_of_a_run(owner: tuple[int, ...]) -> None:
    """I4: with lag 0 and a batch lent, executors begin while the learner opens their round."""
    schedule = Schedule(len(owner), 1, 0)
    schedule.restart(2, lent=True)
    executors = [
        executor_program(index, starts=envs_of(owner, index)) for index in range(max(owner) + 1)
    ]
    ends, _ = explore([*executors, learner_program(owner, lent=True)], schedule, pipes_of(owner))
    assert_everyone_goes_on(ends)
    assert {end.notes[0] for end in ends} == {(), ("is woken",), ("is woken for nothing",)}


class LooksFirst(ExecutorPort):
    """Looks whether the next round is open before it tells the learner."""

    def finish_step(self, env: int) -> bool:
        if not self.schedule.finish_step(env):
            return True
        goes_on = self.go_on_or_park(env)
        self.learner.post([env])
        return goes_on


class TakesFirst(LearnerPort):
    """Takes what is in its inbox before it opens the round, and not after."""

    def open_next_round(self) -> None:
        super().hear()
        super().open_next_round()

    def hear(self) -> None:
        pass


class SaysBeforeItIsDone(ExecutorPort):
    """Tells the learner of a round before the schedule knows."""

    def finish_step(self, env: int) -> bool:
        self.learner.post([env])
        return not self.schedule.finish_step(env) or self.go_on_or_park(env)


@pytest.mark.parametrize(
    ("executor_type", "learner_type"), [(LooksFirst, LearnerPort), (ExecutorPort, TakesFirst)]
)
@pytest.mark.parametrize("owner", [(0,), (0, 0), (0, 1)])
def test_either_order_swapped_loses_a_wake_up(
    owner: tuple[int, ...],
    executor_type: type[ExecutorPort],
    learner_type: type[LearnerPort],
) -> None:
    """I4: the explorer finds the lost wake-up, so that it would find one in the real ports."""
    ends, _ = race(lag=1, owner=owner, executor_type=executor_type, learner_type=learner_type)
    lost = [end for end in ends if Phase.IDLE in end.words["phase"]]
    assert lost
    assert len(lost) < len(ends)  # most orders of events hide the fault
    assert any("is woken" not in notes for end in lost for notes in end.notes[:-1])
    with pytest.raises(AssertionError, match="sleeps for ever"):
        assert_everyone_goes_on(ends)


def test_a_round_announced_too_early_is_lent_too_early() -> None:
    """I5: the explorer finds this fault too."""
    with pytest.raises(ProtocolError, match=r"^round 0 was lent before it was full$"):
        race(lag=0, lent=False, executor_type=SaysBeforeItIsDone)


@pytest.mark.parametrize(
    ("num_actors", "alpha", "lag", "lent", "at_least"),
    [
        (1, 1, 0, False, 350),
        (1, 2, 0, False, 600),
        (2, 1, 0, False, 1000),
        (1, 1, 1, True, 6000),
    ],
)
def test_whole_runs(num_actors: int, alpha: int, lag: int, lent: bool, at_least: int) -> None:
    """I1, I4: an executor, actors and the learner from a start over two rounds to the end.

    The environment has to wait for the second: with lag 1 because a batch is lent at the start.
    """
    owner = (0,)
    last_round = 2 + lent
    begin = Schedule(1, alpha, lag, last_round=last_round)
    begin.restart(int(lent), lent=lent)
    programs = [
        executor_program(0, starts=owner),
        *[actor_program(owner)] * num_actors,
        learner_program(owner, lent=lent, updates=2),
    ]
    ends, states = explore(programs, begin, pipes_of(owner))
    assert states >= at_least
    for end in ends:
        assert end.words["steps"] == [alpha * last_round]
        assert end.words["phase"] == [Phase.IDLE]
        assert end.words["learner"] == [last_round, last_round]
        assert end.pipes["actors"] == []
        assert end.returned[-1], "the learner sleeps for ever"
    notes = {note for end in ends for note in end.notes[0]}
    assert notes == {"goes on", "parks", "is woken", "is woken for nothing"}


# Failures at any operation.


class ListInbox(Inbox):
    """An inbox in a list, for what happens while everybody is at rest."""

    def __init__(self, words: Sequence[int]) -> None:
        super().__init__(-1, -1)
        self.words = list(words)

    def post(self, words: Iterable[int]) -> None:
        self.words += words

    def read_ready(self) -> array[int]:
        taken, self.words = array("H", self.words), []
        return taken


@pytest.mark.parametrize(("lag", "lent"), [(0, False), (1, True)])
@pytest.mark.parametrize("victim", ["executor", "actor"])
def test_a_failure_at_any_operation_is_recovered_from(victim: str, lag: int, lent: bool) -> None:
    """I1, I4: after each operation of a worker, in each interleaving, it dies. The rest follows
    from the words, whatever it has read and not said: two rounds are finished all the same."""
    owner, last_round = (0, 1), 1 + lag
    begin = Schedule(2, 1, lag, last_round=last_round)
    begin.restart(int(lent), lent=lent)
    deaths, broken_at, seen = 0, set(), set()
    for operations in range(24):
        workers = [executor_program(0, starts=[0]), actor_program(owner)]
        dying = 0 if victim == "executor" else 1
        dies = mortal(workers[dying], operations)
        workers[dying] = dies
        programs = [*workers, executor_program(1, starts=[1])]
        ends, _ = explore(programs, begin, pipes_of(owner))
        for end in ends:
            deaths += end.ways
            schedule = Schedule(2, 1, lag, last_round=last_round, **end.words)
            broken_at.add(Phase(schedule.phase[0]))
            pipes = {name: ListInbox(said) for name, said in end.pipes.items()}
            executors = [pipes["executor 0"], pipes["executor 1"]]
            port = LearnerPort(schedule, pipes["learner"], executors, owner)
            port.restore_messages([0] if victim == "executor" else [], pipes["actors"])
            for round_ in range(last_round):
                assert port.has_heard_all(round_) == schedule.is_full(round_)
            # What the learner has counted, told anew to the one of the second exploration.
            counted = [
                env for env in (0, 1) for _ in range(schedule.position(env)[0] - schedule.lent)
            ]
            after = {name: inbox.words for name, inbox in pipes.items()} | {"learner": counted}
            if words(schedule) in seen:  # all that follows, follows from the words
                continue
            seen.add(words(schedule))
            idle = [env for env in (0, 1) if schedule.phase[env] == Phase.IDLE]
            again = [
                *(executor_program(i, starts=[i] if i in idle else []) for i in (0, 1)),
                actor_program(owner),
                learner_program(owner, lent=lent, updates=1),
            ]
            finishes, _ = explore(again, schedule, after)
            for finish in finishes:
                assert finish.words["steps"] == [last_round] * 2
                assert finish.pipes["actors"] == []
                assert finish.returned[-1], "the learner sleeps for ever"
    assert deaths > 100
    assert broken_at >= {Phase.IDLE, Phase.READY}
