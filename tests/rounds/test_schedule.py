"""The schedule of rounds and slots: each event, and what is refused."""

from __future__ import annotations

import pytest
from schedule_reference import Event, assert_refused, send, words

from torchrl_hts._rounds.schedule import Phase, Schedule
from torchrl_hts.errors import HTSError, ProtocolError


def step(schedule: Schedule, env: int) -> bool:
    """One transition of one environment, with nobody else at work."""
    schedule.offer(env)
    schedule.take([env])
    schedule.answer([env])
    return schedule.finish_step(env)


def play_round(schedule: Schedule, *envs: int) -> None:
    """One round of each of these environments."""
    for env in envs:
        for t in range(schedule.sync_interval):
            assert step(schedule, env) == (t == schedule.sync_interval - 1)


def to_phase(schedule: Schedule, env: int, phase: Phase) -> None:
    """Bring an environment that is IDLE to another phase."""
    events: list[Event] = [("offer", env), ("take", 0, [env]), ("answer", [env])]
    for event in events[:phase]:
        send(schedule, event)
    assert schedule.phase[env] == phase


# Each method.


def test_begins_with_lag_plus_one_open_rounds() -> None:
    """I4: rounds 0 to lag act with the initial parameters, so they are open from the start."""
    for lag in range(4):
        schedule = Schedule(2, 3, lag)
        assert schedule.num_slots == lag + 1
        assert [schedule.is_open(r) for r in range(lag + 3)] == [True] * (lag + 1) + [False] * 2
        assert (schedule.lent, schedule.released) == (0, 0)
        assert words(schedule) == ((0, 0), (Phase.IDLE, Phase.IDLE), (0, 0))


def test_an_environments_turn_goes_round() -> None:
    """I1: offer, take, answer, finish_step; each passes the turn on and touches one environment."""
    schedule = Schedule(2, 2, 0)
    seen = []
    for event in (("offer", 1), ("take", 0, [1]), ("answer", [1]), ("finish_step", 1)):
        send(schedule, event)
        seen.append(schedule.phase[1])
    assert seen == [Phase.READY, Phase.TAKEN, Phase.ANSWERED, Phase.IDLE]
    assert words(schedule) == ((0, 1), (Phase.IDLE, Phase.IDLE), (0, 0))


def test_position_counts_rounds_and_steps() -> None:
    """I1: alpha steps are a round, the first included (the authors' off by one)."""
    schedule = Schedule(1, 3, 1)
    seen = []
    for _ in range(6):
        seen.append((*schedule.position(0), step(schedule, 0)))
    assert seen == [
        (0, 0, False), (0, 1, False), (0, 2, True),
        (1, 0, False), (1, 1, False), (1, 2, True),
    ]  # fmt: skip
    assert schedule.position(0) == (2, 0)


def test_a_round_is_full_when_every_environment_has_finished_it() -> None:
    """I1: the last transition of the last environment, not one earlier or later."""
    schedule = Schedule(3, 2, 1)
    play_round(schedule, 0, 2)
    play_round(schedule, 0)
    step(schedule, 1)
    assert not schedule.is_full(0)
    step(schedule, 1)
    assert schedule.is_full(0)
    assert not schedule.is_full(1)


def test_a_round_lives_in_one_of_lag_plus_one_slots() -> None:
    """I2: neighbouring rounds never share a slot unless the lag is 0."""
    assert [Schedule(1, 1, 0).slot(r) for r in range(4)] == [0, 0, 0, 0]
    assert [Schedule(1, 1, 1).slot(r) for r in range(4)] == [0, 1, 0, 1]
    assert [Schedule(1, 1, 2).slot(r) for r in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("lag", range(4))
def test_update_j_opens_round_j_plus_lag_plus_1(lag: int) -> None:
    """I3, I4: lending opens nothing; releasing opens exactly one round."""
    schedule = Schedule(1, 2, lag)
    for _ in range(lag + 1):
        play_round(schedule, 0)
    for j in range(3):
        opened = j + lag + 1
        assert schedule.lend() == j
        assert (schedule.lent, schedule.released) == (j + 1, j)
        assert not schedule.is_open(opened)
        assert schedule.release() == j
        assert (schedule.lent, schedule.released) == (j + 1, j + 1)
        assert schedule.is_open(opened)
        assert not schedule.is_open(opened + 1)
        play_round(schedule, 0)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_there_is_no_barrier(lag: int) -> None:
    """I4: an environment is lag rounds ahead of another that has not even begun its own."""
    schedule = Schedule(2, 2, lag)
    for j in range(4):
        while schedule.is_open(schedule.position(0)[0]):
            play_round(schedule, 0)
        assert schedule.position(0) == (j + lag + 1, 0)
        assert schedule.position(1) == (j, 0)
        play_round(schedule, 1)
        schedule.lend()
        schedule.release()


def test_with_lag_0_everyone_waits_for_the_update() -> None:
    """I4 with lag 0 is plain synchronous learning."""
    schedule = Schedule(2, 1, 0)
    play_round(schedule, 0, 1)
    for env in (0, 1):
        assert_refused(schedule, ("offer", env))
    schedule.lend()
    assert_refused(schedule, ("offer", 0))
    schedule.release()
    play_round(schedule, 0, 1)


def test_the_last_round_ends_the_run() -> None:
    """I4: rounds from last_round on never open, and the others are lent all the same."""
    schedule = Schedule(1, 1, 1, last_round=2)
    for _ in range(2):
        play_round(schedule, 0)
    for _ in range(2):
        schedule.lend()
        schedule.release()
    assert not schedule.is_open(2)
    with pytest.raises(ProtocolError, match=r"^environment 0 was offered in round 2, not open yet"):
        schedule.offer(0)


def test_words_may_lie_in_shared_memory() -> None:
    """The state is in the words alone: two schedules over the same ones agree."""
    memory = bytearray(2 * 8 + 2 + 2 * 8)
    view = memoryview(memory)
    given = {
        "steps": view[:16].cast("q"),
        "phase": view[16:18],
        "learner": view[18:].cast("q"),
    }
    executor, learner = (Schedule(2, 1, 0, **given) for _ in range(2))
    play_round(executor, 0, 1)
    assert learner.is_full(0)
    learner.lend()
    learner.release()
    assert executor.position(0) == (1, 0)
    assert executor.is_open(1)
    assert words(executor) == words(learner)


# Illegal events.


@pytest.mark.parametrize(
    ("event", "needs", "said"),
    [
        (("offer", 1), Phase.IDLE, "offered"),
        (("take", 0, [1]), Phase.READY, "taken"),
        (("answer", [1]), Phase.TAKEN, "answered"),
        (("finish_step", 1), Phase.ANSWERED, "stepped"),
    ],
)
def test_an_event_out_of_turn_is_refused(event: Event, needs: Phase, said: str) -> None:
    """I5: whoever doesn't hold the environment can't touch it."""
    for phase in Phase:
        schedule = Schedule(2, 2, 1)
        to_phase(schedule, 1, phase)
        if phase == needs:
            send(schedule, event)
            continue
        message = f"^environment 1 was {said} while {phase.name}, not {needs.name}$"
        with pytest.raises(ProtocolError, match=message):
            send(schedule, event)
        assert_refused(schedule, event)


def test_offer_in_a_closed_round_is_refused() -> None:
    """I4, I5: nobody writes into a slot whose batch has not been learned from."""
    schedule = Schedule(2, 1, 1)
    play_round(schedule, 0)
    play_round(schedule, 0)
    with pytest.raises(ProtocolError, match=r"^environment 0 was offered in round 2, not open yet"):
        schedule.offer(0)
    assert_refused(schedule, ("offer", 0))
    schedule.offer(1)


def test_lend_before_full_is_refused() -> None:
    """I5: the learner doesn't read what is still being written."""
    schedule = Schedule(2, 1, 1)
    play_round(schedule, 0)
    with pytest.raises(ProtocolError, match=r"^round 0 was lent before it was full$"):
        schedule.lend()
    to_phase(schedule, 1, Phase.ANSWERED)
    assert_refused(schedule, ("lend",))
    schedule.finish_step(1)
    assert schedule.lend() == 0


def test_lend_before_the_update_is_done_is_refused() -> None:
    """I3: one batch at a time, even if the next is full."""
    schedule = Schedule(1, 1, 1)
    play_round(schedule, 0)
    play_round(schedule, 0)
    schedule.lend()
    assert schedule.is_full(1)
    with pytest.raises(ProtocolError, match=r"^round 1 was lent before update 0 was done$"):
        schedule.lend()
    assert_refused(schedule, ("lend",))


def test_release_without_a_batch_is_refused() -> None:
    """I3: an update that no batch belongs to can't open a round."""
    schedule = Schedule(1, 1, 0)
    message = r"^release without a batch lent$"
    with pytest.raises(ProtocolError, match=message):
        schedule.release()
    play_round(schedule, 0)
    assert_refused(schedule, ("release",))
    schedule.lend()
    schedule.release()
    with pytest.raises(ProtocolError, match=message):
        schedule.release()
    assert_refused(schedule, ("release",))


def test_an_environment_twice_in_one_event_is_refused() -> None:
    """I5: an actor has an environment once."""
    schedule = Schedule(2, 1, 0)
    schedule.offer(0)
    with pytest.raises(ProtocolError, match=r"^an environment was taken twice at once: \(0, 0\)$"):
        schedule.take([0, 0])
    schedule.take([0])
    with pytest.raises(ProtocolError, match=r"^an environment was answered twice at once"):
        schedule.answer([0, 0])


@pytest.mark.parametrize("event", [("take", 0, [0, 1]), ("take", 0, [0, 0])])
def test_take_is_all_or_nothing(event: Event) -> None:
    """I5: environment 0 could be taken, but not together with that one."""
    schedule = Schedule(2, 1, 0)
    schedule.offer(0)
    assert_refused(schedule, event)
    schedule.take(iter([0]))
    assert schedule.phase[0] == Phase.TAKEN


@pytest.mark.parametrize("event", [("answer", [0, 1]), ("answer", [0, 0])])
def test_answer_is_all_or_nothing(event: Event) -> None:
    """I5: environment 0 could be answered, but not together with that one."""
    schedule = Schedule(2, 1, 0)
    to_phase(schedule, 0, Phase.TAKEN)
    schedule.offer(1)
    assert_refused(schedule, event)
    schedule.answer(iter([0]))
    assert schedule.phase[0] == Phase.ANSWERED


def test_protocol_error_is_a_runtime_error_of_this_package() -> None:
    """Callers can catch it either way."""
    assert issubclass(ProtocolError, HTSError)
    assert issubclass(ProtocolError, RuntimeError)


# Restart.


@pytest.mark.parametrize("lag", range(3))
@pytest.mark.parametrize("first_round", [0, 1, 5])
def test_restart(first_round: int, lag: int) -> None:
    """I1, I4: every environment is at step 0 of the round, and lag + 1 rounds are open."""
    schedule = Schedule(2, 3, lag)
    step(schedule, 0)
    schedule.offer(1)
    schedule.restart(first_round)
    assert words(schedule) == ((3 * first_round,) * 2, (Phase.IDLE,) * 2, (first_round,) * 2)
    assert schedule.position(1) == (first_round, 0)
    assert schedule.is_open(first_round + lag)
    assert not schedule.is_open(first_round + lag + 1)
    assert_refused(schedule, ("release",))
    play_round(schedule, 0, 1)
    assert schedule.lend() == first_round
    assert schedule.release() == first_round


@pytest.mark.parametrize("lag", range(3))
def test_restart_with_a_batch_lent(lag: int) -> None:
    """I5: the slot of the lent batch stays closed until it is released."""
    schedule = Schedule(2, 2, lag)
    schedule.restart(4, lent=True)
    assert (schedule.lent, schedule.released) == (4, 3)
    assert [schedule.is_open(4 + ahead) for ahead in range(lag + 1)] == [True] * lag + [False]
    assert schedule.slot(3) not in {schedule.slot(r) for r in range(4, 4 + lag)}
    assert_refused(schedule, ("lend",))
    assert schedule.release() == 3
    assert schedule.is_open(4 + lag)
    assert not schedule.is_open(4 + lag + 1)
    play_round(schedule, 0, 1)
    assert schedule.lend() == 4


@pytest.mark.parametrize("lag", range(3))
def test_restart_with_full_rounds_ahead(lag: int) -> None:
    """I1, I4: environments start after the rounds that are full; the learner takes those first."""
    schedule = Schedule(2, 3, lag)
    schedule.restart(4, ahead=lag)
    assert [schedule.position(env) for env in (0, 1)] == [(4 + lag, 0)] * 2
    assert [schedule.is_open(4 + lag), schedule.is_open(4 + lag + 1)] == [True, False]
    for round_ in range(4, 4 + lag):
        assert schedule.lend() == round_
        assert schedule.release() == round_
    assert_refused(schedule, ("lend",))


@pytest.mark.parametrize(("lent", "ahead"), [(False, 3), (True, 2)])
def test_more_full_rounds_than_slots_are_refused(lent: bool, ahead: int) -> None:
    schedule = Schedule(2, 3, lag=1)
    before = words(schedule)
    with pytest.raises(ProtocolError, match=f"{ahead} full rounds don't fit into 2 slots"):
        schedule.restart(4, lent=lent, ahead=ahead)
    assert words(schedule) == before


# Failures.


@pytest.mark.parametrize("phase", Phase)
def test_recover(phase: Phase) -> None:
    """I1: an executor's environments begin their transition anew; actors give back what they took.

    What has been offered or answered for the others stays.
    """
    schedule = Schedule(2, 2, 0)
    for env in (0, 1):
        step(schedule, env)
        to_phase(schedule, env, phase)
    schedule.recover([1])
    kept = Phase.READY if phase == Phase.TAKEN else phase
    assert words(schedule) == ((1, 1), (kept, Phase.IDLE), (0, 0))
