"""The claims and the recursion, against slow references that look like the rules."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from torchrl_hts._rounds.schedule import Schedule
from torchrl_hts._world.tree import swaps
from torchrl_hts.theory import asynchronous_latency, exchange_time, rollout_time, timetable

Array = np.ndarray[Any, Any]


# The recursion.


def may_begin(schedule: Schedule, round_: int, barrier: bool) -> bool:
    """Whether the round is open and, with a barrier, everybody has finished the one before."""
    arrived = not barrier or round_ == 0 or schedule.is_full(round_ - 1)
    return schedule.is_open(round_) and arrived  # I4


def simulate(
    times: Array, learner_times: Array, exchange_times: Array, lag: int, barrier: bool
) -> dict[str, Array]:
    """One event after the other, by the rules of `Schedule` itself.

    The schedules raise if an event comes that they do not allow, and say themselves which rounds
    are open and full: nothing here knows of the recursion.

    Args:
        times: ``[R, N, T]``.
        learner_times: ``[R, W]``; each learner has a schedule of its own, for N/W environments.
        exchange_times: ``[R]``.
    """
    rounds, n, alpha = times.shape
    learners = learner_times.shape[1]
    each = n // learners
    schedules = [Schedule(each, alpha, lag, last_round=rounds) for _ in range(learners)]
    found = {
        "opened": np.zeros(rounds),
        "started": np.full((rounds, n), np.nan),
        "finished": np.full((rounds, n), np.nan),
        "learned": np.full(rounds, np.nan),
    }
    events: list[tuple[float, str, int]] = []  # when what ends: a step, a gradient, an exchange
    idle, learning, ready = set(range(n)), set[int](), set[int]()

    def begin_all_that_may(now: float) -> None:
        for env in sorted(idle):
            schedule, own = schedules[env // each], env % each
            round_, t = schedule.position(own)
            if may_begin(schedule, round_, barrier):
                idle.remove(env)
                schedule.offer(own)
                schedule.take([own])
                schedule.answer([own])
                if t == 0:
                    found["started"][round_, env] = now
                heapq.heappush(events, (now + times[round_, env, t], "step", env))
        for learner, schedule in enumerate(schedules):
            nxt = schedule.lent
            if learner not in learning and nxt < rounds and schedule.is_full(nxt):  # I3, I5
                schedule.lend()
                learning.add(learner)
                heapq.heappush(events, (now + learner_times[nxt, learner], "gradient", learner))

    begin_all_that_may(0.0)
    while events:
        now, what, number = heapq.heappop(events)
        if what == "gradient":
            ready.add(number)
            if len(ready) == learners:
                ready.clear()
                round_ = schedules[0].lent - 1
                heapq.heappush(events, (now + exchange_times[round_], "exchange", round_))
        elif what == "exchange":
            learning.clear()
            assert {schedule.release() for schedule in schedules} == {number}
            found["learned"][number] = now
            if number + lag + 1 < rounds:
                found["opened"][number + lag + 1] = now
        else:
            schedule, own = schedules[number // each], number % each
            round_, _ = schedule.position(own)
            if schedule.finish_step(own):  # I1
                found["finished"][round_, number] = now
            idle.add(number)
        begin_all_that_may(now)
    return found


whole_times = st.integers(0, 9).map(float)  # sums of whole numbers are exact in any order


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_recursion_is_what_the_schedule_does(data: st.DataObject) -> None:
    """I1, I3, I4, I5: event by event, for any times and numbers of learners."""
    learners = data.draw(st.integers(1, 3))
    rounds, each, alpha = data.draw(
        st.tuples(st.integers(1, 6), st.integers(1, 4 // learners + 1), st.integers(1, 3))
    )

    def drawn(*shape: int) -> Array:
        return data.draw(st_numpy.arrays(np.float64, shape, elements=whole_times))

    times, learner = drawn(rounds, learners * each, alpha), drawn(rounds, learners)
    exchange = drawn(rounds) if learners > 1 else np.zeros(rounds)
    lag, barrier = data.draw(st.integers(0, 3)), data.draw(st.booleans())
    expected = simulate(times, learner, exchange, lag, barrier)
    options: dict[str, Any] = {
        "lag": lag,
        "learner_time": learner,
        "exchange_time": exchange,
        "learners": learners,
        "barrier": "round" if barrier else None,
    }
    found = timetable(times, **options)
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)
    np.testing.assert_array_equal(timetable(times.sum(2), **options).learned, found.learned)


def test_times_of_all_learners_and_updates_may_be_one_number() -> None:
    times = np.random.default_rng(0).exponential(size=(9, 4, 3))
    one = timetable(times, learners=2, learner_time=0.5, exchange_time=0.25)
    for learner_time in (np.full(9, 0.5), np.full((9, 2), 0.5)):
        each = timetable(
            times, learners=2, learner_time=learner_time, exchange_time=np.full(9, 0.25)
        )
        np.testing.assert_array_equal(one.learned, each.learned)


@pytest.mark.parametrize("num_values", [1, 65_535, 65_536, 1_700_000])
@pytest.mark.parametrize("learners", [1, 2, 4, 8, 64])
def test_an_exchange_takes_the_time_of_its_messages(num_values: int, learners: int) -> None:
    """One after the other, as `World` sends them."""
    sent = [swap.give for swap in swaps(learners // 2, learners, num_values)]
    taken = [swap.take for swap in swaps(learners // 2, learners, num_values)]
    expected = sum(
        1e-4 + max(give[1] - give[0], take[1] - take[0]) * 4 / 1e8
        for give, take in zip(sent, taken, strict=True)
    )
    found = exchange_time(num_values, learners, latency_s=1e-4, bytes_per_second=1e8)
    assert found == pytest.approx(expected, rel=1e-3)  # halves are not always whole values


def test_a_barrier_at_each_step_waits_for_the_slowest_of_each() -> None:
    times = np.array([[[1.0, 2.0], [3.0, 1.0]], [[4.0, 1.0], [1.0, 1.0]]])  # [R, N, T]
    found = timetable(times, lag=1, barrier="step")
    assert found.finished.tolist() == [[5.0, 5.0], [10.0, 10.0]]
    assert found.work.tolist() == [[3.0, 4.0], [5.0, 2.0]]
    assert found.share_of_ideal == 7 / 10
    assert found.steps_per_second(2) == 8 / 10


# docs/explanation/theory.md: alpha to the share at lag 0, lag 1 with barrier, lag 1, lag 2.
TABLE = {
    5: (0.447, 0.517, 0.747, 0.849),
    20: (0.577, 0.698, 0.907, 0.954),
    128: (0.684, 0.860, 0.982, 0.992),
}


@pytest.mark.parametrize("alpha", TABLE)
def test_the_shares_of_the_table(alpha: int) -> None:
    """16 environments, exponential times, learner 0.3 alpha; from 20,000 rounds, here 2,000."""
    sums = np.random.default_rng(0).gamma(alpha, size=(2_000, 16))
    settings_ = [(0, None), (1, "round"), (1, None), (2, None)]
    found = [
        timetable(sums, lag=lag, learner_time=0.3 * alpha, barrier=barrier).share_of_ideal
        for lag, barrier in settings_
    ]
    assert found == pytest.approx(TABLE[alpha], abs=0.006)


def test_waiting_at_each_step_gives_a_third() -> None:
    """The mean of the largest of n exponential times is the n-th harmonic number."""
    times = np.random.default_rng(0).exponential(size=(2_000, 16, 5))
    expected = 1 / sum(1 / k for k in range(1, 17))
    assert timetable(times, barrier="step").share_of_ideal == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("step_times", "options", "message"),
    [
        (np.ones(3), {}, "shape"),
        (np.ones((0, 2)), {}, "none of them 0"),
        (np.ones((2, 2)), {"barrier": "step"}, "time of each step"),
        (np.ones((2, 2)), {"barrier": "epoch"}, "'round'"),
        (np.ones((2, 2)), {"lag": -1}, "lag"),
        (np.ones((2, 2)), {"learner_time": np.ones(3)}, "learner_time"),
        (-np.ones((2, 2)), {}, "negative"),
        (np.ones((2, 2)), {"learner_time": math.nan}, "finite"),
        (np.ones((2, 2)), {"learner_time": np.ones((2, 3)), "learners": 2}, r"or \[2, 2\], got"),
        (np.ones((2, 2)), {"exchange_time": np.ones(3)}, "exchange_time"),
        (np.ones((2, 2)), {"exchange_time": -1.0}, "negative"),
        (np.ones((2, 3)), {"learners": 2}, "3 environments can't be shared out"),
        (np.ones((2, 2)), {"learners": 0}, "learners"),
    ],
)
def test_what_is_no_schedule_is_refused(
    step_times: Array, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        timetable(step_times, **options)


# Claim 1.


def mean_of_the_largest(num_envs: int, alpha: int) -> float:
    """The exact mean of the largest of n Gamma(alpha) times: the integral of 1 - F(x)^n."""
    x = np.linspace(0, 10 * alpha + 60, 400_001)
    term = np.exp(-x)
    survival = term.copy()  # P(Poisson(x) < alpha), summed up as it is written
    for k in range(1, alpha):
        term = term * x / k
        survival += term
    return float(np.trapezoid(1 - (1 - survival) ** num_envs, x))


@pytest.mark.parametrize(
    ("num_envs", "alpha", "tolerance"),
    [(16, 1, 0.010), (16, 4, 0.004), (16, 20, 0.004), (16, 128, 0.004), (64, 5, 0.004)],
)
def test_claim_1_against_the_exact_mean(num_envs: int, alpha: int, tolerance: float) -> None:
    slowest = rollout_time(num_envs * alpha, num_envs, alpha)
    assert slowest == pytest.approx(mean_of_the_largest(num_envs, alpha), rel=tolerance)


def test_claim_1_check_values() -> None:
    """Mean steps per step: by hand at alpha = 1; a factor of 2.9 from there to alpha = 128."""
    per_step = {alpha: rollout_time(16 * 100, 16, alpha) / 100 for alpha in (1, 128)}
    assert per_step[1] == pytest.approx(math.log(16) + np.euler_gamma, rel=1e-12)
    assert per_step[128] == pytest.approx(1.162, rel=0.004)
    assert per_step[1] / per_step[128] == pytest.approx(2.9, abs=0.05)
    assert rollout_time(300, 1, 20, 0.5) == 150, "a lone environment waits for nobody"
    assert rollout_time(1600, 16, 20, 0.01) == pytest.approx(rollout_time(1600, 16, 20) / 100)


def test_claim_1_is_the_recursion_with_a_barrier() -> None:
    """The same from both ends: waiting at the end of each round, a learner that costs nothing."""
    sums = np.random.default_rng(0).gamma(20, size=(4_000, 16))
    found = timetable(sums, lag=1, barrier="round").duration
    assert found == pytest.approx(rollout_time(4_000 * 16 * 20, 16, 20), rel=0.005)


# Claim 2.


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_claim_2_against_a_queue(load: float) -> None:
    """Batches of n environments queue for the learner: how many are ahead of one that comes."""
    n, learner_rate, arrivals = 8, 5.0, 400_000
    env_rate = load * learner_rate / n
    random = np.random.default_rng(0)
    came = np.sort(random.uniform(0, arrivals / (n * env_rate), arrivals))  # n Poisson sources
    takes = random.exponential(1 / learner_rate, arrivals)
    done = np.empty(arrivals)
    free = 0.0
    for batch in range(arrivals):
        free = done[batch] = max(free, came[batch]) + takes[batch]
    ahead = np.arange(arrivals) - np.searchsorted(done, came)
    assert ahead.mean() == pytest.approx(asynchronous_latency(n, env_rate, learner_rate), rel=0.05)


def test_claim_2_without_an_end() -> None:
    assert asynchronous_latency(4, 1.0, 4.0) == math.inf
    assert asynchronous_latency(5, 1.0, 4.0) == math.inf


@pytest.mark.parametrize(
    "call",
    [
        lambda: rollout_time(0, 16, 5),
        lambda: rollout_time(100, 0, 5),
        lambda: rollout_time(100, 16, 0),
        lambda: rollout_time(100, 16, 5, -1.0),
        lambda: asynchronous_latency(0, 1.0, 1.0),
        lambda: asynchronous_latency(1, 0.0, 1.0),
        lambda: asynchronous_latency(1, 1.0, math.nan),
        lambda: asynchronous_latency(1, math.inf, math.inf),
        lambda: rollout_time(100, 16, 5, math.nan),
        lambda: rollout_time(100, 16, 5, math.inf),
        lambda: exchange_time(0, 2, latency_s=0.0, bytes_per_second=1.0),
        lambda: exchange_time(9, 3, latency_s=0.0, bytes_per_second=1.0),
        lambda: exchange_time(9, 2, latency_s=-1.0, bytes_per_second=1.0),
        lambda: exchange_time(9, 2, latency_s=0.0, bytes_per_second=0.0),
    ],
)
def test_claims_refuse_what_makes_no_sense(call: Any) -> None:
    with pytest.raises(ValueError, match=r"must|got"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: rollout_time(100, 16, 2.5),  # type: ignore[arg-type]
        lambda: rollout_time(math.nan, 16, 5),  # type: ignore[arg-type]
        lambda: asynchronous_latency(4.5, 1.0, 20.0),  # type: ignore[arg-type]
        lambda: timetable(np.ones((2, 2)), lag=1.5),  # type: ignore[arg-type]
    ],
)
def test_counts_are_integers(call: Any) -> None:
    with pytest.raises(TypeError, match="must be an int, got"):
        call()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: rollout_time(100, 16, 5, "1"), "mean_step_s"),  # type: ignore[arg-type]
        (lambda: asynchronous_latency(1, None, 1.0), "env_rate"),  # type: ignore[arg-type]
        (lambda: asynchronous_latency(1, 1.0, "2"), "learner_rate"),  # type: ignore[arg-type]
        (lambda: exchange_time(9, 2, latency_s=None, bytes_per_second=1.0), "latency_s"),  # type: ignore[arg-type]
        (lambda: exchange_time(9, 2, latency_s=0.0, bytes_per_second="1"), "bytes_per_second"),  # type: ignore[arg-type]
        (lambda: timetable([["1", "2"]]), "step_times"),
        (lambda: timetable(np.ones((2, 2)), learner_time=None), "learner_time"),  # type: ignore[arg-type]
    ],
)
def test_times_and_rates_are_numbers(call: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be .*number.*, got"):
        call()


@pytest.mark.parametrize("alpha", [0, -1])
def test_a_round_has_steps(alpha: int) -> None:
    with pytest.raises(ValueError, match=f"sync_interval must be at least 1, got {alpha}"):
        timetable(np.ones((2, 2))).steps_per_second(alpha)


def test_whole_numbers_may_be_floats() -> None:
    link = {"latency_s": 1e-4, "bytes_per_second": 1e8}
    assert exchange_time(1e6, 4.0, **link) == exchange_time(10**6, 4, **link)  # type: ignore[arg-type]
    times = np.ones((3, 2))
    found = timetable(times, lag=1.0, learners=2.0)  # type: ignore[arg-type]
    assert found.duration == timetable(times, lag=1, learners=2).duration


def test_the_share_is_of_the_time_that_environments_step() -> None:
    found = timetable(np.tile([1.0, 3.0], (1000, 1)))
    assert found.share_of_ideal == pytest.approx((1 / 3 + 1) / 2, abs=2e-3)
