"""make_in_thread: environments that wait side by side, with the bits of those that don't."""

from __future__ import annotations

import queue
import random
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import played_elsewhere
import pytest
from environments import EchoEnv, wrapped_in_disguise
from played_elsewhere import check_going_on, gather, gather_twice
from probe import ask_for_states, take_for_hung_after
from resumption import check_resumption
from thread_environments import (
    ClosedTogether,
    Faulty,
    Interrupting,
    OwnDraws,
    Reusing,
    Together,
    the_same,
)

from torchrl_hts import WorkerError
from torchrl_hts.envs import make_in_thread

pytestmark = pytest.mark.usefixtures("nothing_left")


start = partial(played_elsewhere.start, num_executors=1)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_executors", [1, 3])
def test_i7_environments_in_threads_give_the_bits_of_others(num_executors: int, lag: int) -> None:
    """They keep their observations in one array, which the next episode's first is written to."""
    make = partial(make_in_thread, OwnDraws)
    mixed = [make, OwnDraws, make, make]
    gathered = gather_twice(mixed, num_executors=num_executors, lag=lag)
    assert (gathered == gather_twice([OwnDraws] * 4, num_executors=1, lag=lag)).all()


def test_what_environments_write_to_again_is_read_before() -> None:
    found = []
    for make in (Reusing, partial(make_in_thread, Reusing)):
        with start([make] * 2, info_keys=["won"]) as collector:
            found.append(gather(collector))
    assert found[0]["next", "won"].sum() > 0
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("length", [4, 100])
def test_they_wait_side_by_side(length: int) -> None:
    """In the resets that follow on a step too."""
    make = partial(make_in_thread, partial(Together, 3, length))
    with start([make] * 3, max_frames_per_traj=4) as collector:
        batch = gather(collector)
    assert batch["next", "done"].sum() == 18


def test_they_close_side_by_side(tmp_path: Path) -> None:
    with start([partial(make_in_thread, partial(ClosedTogether, tmp_path))] * 3) as collector:
        gather(collector)
    assert len([*tmp_path.iterdir()]) == 3


def test_a_run_goes_on_bit_for_bit() -> None:
    check_going_on(OwnDraws, partial(make_in_thread, OwnDraws))


def test_an_environment_without_a_protocol_is_resumed() -> None:
    make = partial(gym.make, "FrozenLake-v1")  # slips at random
    check_resumption(partial(make_in_thread, make), steps=60)


def test_without_a_number_one_executor_has_those_that_wait() -> None:
    with start(
        [partial(make_in_thread, partial(Waiting, 0.01))] * 8, num_executors=None
    ) as collector:
        assert collector.num_executors == 1


class Waiting(EchoEnv):
    """Every step takes so many seconds, of which none is computed in."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def step(self, action: Any) -> Any:
        threading.Event().wait(self.step_s)
        return super().step(action)


class Reopening(EchoEnv):
    """Its resets after the first take a fifth of a second."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is None:
            threading.Event().wait(0.2)
        return super().reset(seed=seed)


def test_the_time_of_a_step_includes_the_reset_that_follows() -> None:
    """Of this executor's only environment; others' steps would be counted in."""
    with start([partial(make_in_thread, Reopening)]) as collector:
        gather(collector)
        times = collector.statistics().step_times
    assert sum(number for under_s, number in times.items() if under_s > 0.2) >= 4


def test_what_has_begun_when_it_is_closed_is_forgotten() -> None:
    """Else whoever draws from then on would be taken for one that must not."""
    env = make_in_thread(EchoEnv)
    env.begin_reset(3)
    random.random()
    env.close()
    other = make_in_thread(EchoEnv)
    other.begin_reset(3)
    assert other.reset(seed=3)[0].tolist() == [3, 0, 0, -1]
    other.close()


DRAWN = r"has drawn from random, np\.random or torch's.*use make_in_thread for none of these"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "environment 1 failed in round 0, step 2.*ValueError: the ball left the"),
        ("raises at its second reset", "environment 1 failed in round 0.*the ball won't come"),
        ("exits", "environment 1 failed in round 0, step 2.*SystemExit: 3"),
        ("dies", "executor 0 .*exit code 7"),
        ("draws at its reset", DRAWN),
        ("draws from random", DRAWN),
        ("draws from np.random", DRAWN),
        ("draws from torch", DRAWN),
        ("puts random back", DRAWN),
        ("puts np.random back", DRAWN),
        ("puts torch back", DRAWN),
        ("forks", DRAWN),  # and what was forked ends
    ],
)
def test_what_goes_wrong_in_a_thread_is_told(fault: str, said: str) -> None:
    factories = [partial(make_in_thread, each) for each in (EchoEnv, partial(Faulty, fault))]
    with start(factories) as collector, pytest.raises(WorkerError, match=f"(?s){said}"):
        gather(collector)


def test_draws_beside_environments_in_threads_are_errors_or_their_own() -> None:
    """Which of the two is a matter of timing; wrong numbers aren't, nor which one is named."""
    factories = [
        partial(make_in_thread, partial(Waiting, 0.05)),
        partial(Faulty, "draws from random"),
    ]
    with (
        start(factories) as collector,
        pytest.raises(WorkerError, match=f"(?s){DRAWN}") as error,
    ):
        gather(collector, 8)
    assert error.value.env_indices == (1,)


def test_a_step_that_hangs_is_named() -> None:
    factories = [partial(make_in_thread, each) for each in (EchoEnv, partial(Faulty, "hangs"))]
    said = "made no progress for 5 s.*while environment 1 was stepped in round 0, step 2"
    with start(factories, timeout_s=300) as collector:
        take_for_hung_after(collector, 5)
        with pytest.raises(WorkerError, match=f"(?s){said}"):
            gather(collector)


def test_an_environment_looks_like_its_own() -> None:
    env, own = make_in_thread(OwnDraws), OwnDraws()
    assert env.observation_space == own.observation_space
    assert env.action_space == own.action_space
    assert env.render_mode == own.render_mode
    first, _ = env.reset(seed=1)
    assert first[3] == -1
    assert env.np_random.bit_generator.state == env.held.np_random.bit_generator.state
    env.close()
    env.close()
    for late in (env.reset, env.render, partial(env.step, 0)):
        with pytest.raises(gym.error.ClosedEnvironmentError, match="has been closed"):
            late()
    assert "environment" not in {thread.name for thread in threading.enumerate()}


def test_a_thread_ends_where_no_environment_is_made() -> None:
    with pytest.raises(ZeroDivisionError):
        make_in_thread(lambda: 1 // 0)
    with pytest.raises(TypeError, match=r"takes a factory.*got <environments\.EchoEnv"):
        make_in_thread(EchoEnv())  # type: ignore[arg-type]
    for factory in (wrapped_in_disguise, partial(gym.make_vec, "CartPole-v1")):
        with pytest.raises(TypeError, match=r"expected one gymnasium\.Env"):
            make_in_thread(factory)


def test_an_interrupted_call_leaves_the_others_alone() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    env = make_in_thread(Interrupting)
    env.reset(seed=0)
    try:
        with pytest.raises(KeyboardInterrupt):
            env.step(0)
    finally:
        signal.signal(signal.SIGINT, handler)
    env.held.end.set()  # type: ignore[union-attr]
    (observation, _), (next_observation, *_) = env.reset(seed=3), env.step(2)
    assert observation.tolist() == [3, 0, 0, -1]
    assert next_observation.tolist() == [3, 0, 1, 2]
    with pytest.raises(queue.Empty):
        env.close()


def test_two_that_hold_one_environment_are_refused() -> None:
    with pytest.raises(WorkerError, match=r"create_env_fn\[1\] made the environment that"):
        start([partial(make_in_thread, the_same)] * 2)


def test_where_draws_cannot_be_seen_nothing_plays_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask_for_states(monkeypatch)
    env = make_in_thread(OwnDraws)
    env.begin_reset(3)
    env.reset(seed=3)
    assert not env.begin_step(1)
    assert env.step(1)[0][3] == 1
    env.close()
