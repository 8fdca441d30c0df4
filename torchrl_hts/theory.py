"""What throughput to expect: the paper's two claims, and the recursion of the schedule.

Source: I.-J. Liu, R. A. Yeh, A. G. Schwing, *High-Throughput Synchronous Deep RL*, NeurIPS 2020
(arXiv 2012.09849), Claims 1 and 2. The recursion is that of docs/explanation/theory.md; unlike the
claims it takes step times as they are, of any distribution, equal or not from one environment to
the next.

No torch, no processes: numbers alone. Times are in seconds, or in any other unit throughout.

Axes: R rounds, N environments of all learners, T = alpha steps of an environment and round, W
learners.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchrl_hts.errors.checks import check_integer, check_number

__all__ = ["Timetable", "asynchronous_latency", "exchange_time", "rollout_time", "timetable"]

Times = npt.NDArray[np.float64]

# From so many values on learners swap halves of them, which sends fewer bytes, in more messages.
_HALVING_FROM = 65_536

_BISECTIONS = 200  # far more than a double has bits: the bracket closes before


def rollout_time(
    num_steps: int, num_envs: int, sync_interval: int, mean_step_s: float = 1.0
) -> float:
    """Expected time of a rollout whose environments wait for each other every ``alpha`` steps.

    Claim 1 of the paper: ``E[T] ~ K / (n alpha) * ((1 - g) Q(1 - 1/n) + g Q(1 - 1/(n e)))``, the
    largest of n sums, in the limit of many. Q is the quantile function of Gamma(alpha) times the
    mean step, and g = 0.5772 the Euler-Mascheroni constant.

    Assumes step times that are independent and exponential, with the same mean in every
    environment. There is a barrier at the end of each round, and the learner is never waited for.
    From the exact mean it differs by less than 0.4 % for 8 environments and more with alpha >= 4.
    It differs by -0.9 % for 16 with alpha = 1, and by -15 % at worst, for 2 with alpha = 1.

    Args:
        num_steps: K, of all environments together.
        num_envs: n, the number of environments.
        sync_interval: alpha.
        mean_step_s: mean time of a step.

    Raises:
        TypeError: for a count that is no integer, or a time that is no number.
        ValueError: for a count below 1, or a time that is negative or not finite.

    Example:
        Longer rounds even out the differences between environments: 100 steps of each of 16
        take 335 mean steps if they wait at every step, and 144 if they wait every 20.

        >>> [round(rollout_time(1600, 16, alpha)) for alpha in (1, 20, 100)]
        [335, 144, 119]
    """
    num_steps = check_integer("num_steps", num_steps)
    num_envs = check_integer("num_envs", num_envs)
    sync_interval = check_integer("sync_interval", sync_interval)
    mean_step_s = _finite("mean_step_s", mean_step_s)
    g = np.euler_gamma
    # The largest of one is the one; the limit is of no use there.
    slowest = float(sync_interval)
    if num_envs > 1:
        slowest = (1 - g) * _gamma_upper_quantile(1 / num_envs, sync_interval)
        slowest += g * _gamma_upper_quantile(1 / (num_envs * math.e), sync_interval)
    return num_steps / (num_envs * sync_interval) * slowest * mean_step_s


def asynchronous_latency(num_envs: int, env_rate: float, learner_rate: float) -> float:
    """Expected number of updates that data of an asynchronous method wait for: its staleness.

    Claim 2 of the paper: ``E[L] = n r / (1 - n r)``, r = l / m. It is the mean number in an M/M/1
    queue that n sources of rate l fill and a learner of rate m empties. It is infinite for ``n r >=
    1``, where the queue grows without end. HTS-RL's staleness is its lag, whatever the rates.

    Assumes that data come as a Poisson process, that learning takes exponential times, and that
    the queue has no bound.

    Args:
        num_envs: n, the number of environments.
        env_rate: l, batches that one environment yields per second.
        learner_rate: m, batches that the learner can take per second.

    Raises:
        TypeError: for a count that is no integer, or a rate that is no number.
        ValueError: for a count below 1, or a rate that is not positive or not finite.

    Example:
        >>> [round(asynchronous_latency(n, 1.0, 20.0), 1) for n in (4, 16, 19, 20)]
        [0.2, 4.0, 19.0, inf]
    """
    num_envs = check_integer("num_envs", num_envs)
    env_rate = _finite("env_rate", env_rate, above_0=True)
    learner_rate = _finite("learner_rate", learner_rate, above_0=True)
    load = num_envs * env_rate / learner_rate
    return load / (1 - load) if load < 1 else math.inf


def exchange_time(
    num_values: int, learners: int, *, latency_s: float, bytes_per_second: float
) -> float:
    """How long W learners take to add up their gradients, once all have theirs.

    As `torchrl_hts.World` with shards does it, in a tree of log2(W) levels. Short vectors are
    swapped whole at each level, ``log2(W) (l + b/B)``. From 65,536 values on, halves of what is
    left are, and the parts are collected in the end: ``2 log2(W) l + 2 (1 - 1/W) b/B``. Here b is
    the size in bytes of the float32 values, l the latency of a message, and B the bandwidth.

    Assumes that each learner sends and receives at the same time at full speed, whoever else does,
    and that adding costs nothing.

    Args:
        num_values: of the gradient, float32.
        learners: W, a power of two.
        latency_s: l, of a message between two learners, in seconds.
        bytes_per_second: B, of each learner's connection, each way.

    Raises:
        TypeError: for a count that is no integer, or a time or speed that is no number.
        ValueError: for a count below 1, learners that are no power of two, or times and speeds
            that are negative, zero or not finite.

    Example:
        1.7 million values between machines with 1 Gbit/s, in milliseconds:

        >>> link = {"latency_s": 1e-4, "bytes_per_second": 125e6}
        >>> [round(1e3 * exchange_time(1_700_000, w, **link)) for w in (1, 2, 4, 64)]
        [0, 55, 82, 108]
    """
    num_values = check_integer("num_values", num_values)
    learners = check_integer("learners", learners)
    if learners & (learners - 1):
        raise ValueError(f"learners must be a power of two, got {learners}")
    latency_s = _finite("latency_s", latency_s)
    bytes_per_second = _finite("bytes_per_second", bytes_per_second, above_0=True)
    levels = learners.bit_length() - 1
    sending = 4 * num_values / bytes_per_second
    if num_values < _HALVING_FROM:
        return levels * (latency_s + sending)
    return 2 * levels * latency_s + 2 * (1 - 1 / learners) * sending


@dataclass(frozen=True)
class Timetable:
    """When everything happens; what `timetable` returns.

    Attributes:
        opened: ``[R]``, when each round opened; 0 for the first ``lag + 1``.
        started: ``[R, N]``, when each environment began each round.
        finished: ``[R, N]``, when it had made its alpha steps.
        learned: ``[R]``, when the update with each round was done, on all learners at once.
        work: ``[R, N]``, the time that an environment that never waits would take for each round.
    """

    opened: Times
    started: Times
    finished: Times
    learned: Times
    work: Times

    @property
    def duration(self) -> float:
        """From the start until the last update is done."""
        return float(self.learned[-1])

    @property
    def share_of_ideal(self) -> float:
        """Share of the time that environments step, on average over them; between 0 and 1.

        For environments alike it is the throughput over that of environments that never wait.

        A first round that nobody learns from meanwhile and a last one that nobody steps beside
        count in full: for the value of a long run take some hundred rounds.
        """
        return float(self.work.mean(1).sum()) / self.duration if self.duration else 1.0

    def steps_per_second(self, sync_interval: int) -> float:
        """Steps of all environments over the time they took.

        Args:
            sync_interval: alpha, the steps of each environment in a round.

        Raises:
            TypeError: if it is no integer.
            ValueError: if it is below 1.
        """
        sync_interval = check_integer("sync_interval", sync_interval)
        return self.work.size * sync_interval / self.duration if self.duration else math.inf


def timetable(
    step_times: npt.ArrayLike,
    *,
    lag: int = 1,
    learner_time: npt.ArrayLike = 0.0,
    barrier: Literal["step", "round"] | None = None,
    learners: int = 1,
    exchange_time: npt.ArrayLike = 0.0,
) -> Timetable:
    """Follow the schedule round by round, for given times.

    With G_ij the time that environment i takes for the steps of round j, and L_j that of update j::

        start_ij  = max(finish_i(j-1), open_j)
        finish_ij = start_ij + G_ij
        learned_j = max(learned_(j-1), max_i finish_ij) + L_j
        open_(j+lag+1) = learned_j

    Several learners w have N/W environments each, and wait for the slowest gradient, the time of
    which is L_wj; the exchange then takes X_j::

        ready_wj  = max(learned_(j-1), max_(i of w) finish_ij) + L_wj
        learned_j = max_w ready_wj + X_j

    Assumes nothing of the times but that they don't depend on each other's course. Inference is
    part of a step or costs nothing, and everybody has a processor when it needs one.

    Args:
        step_times: ``[R, N, T]``, the time of each step; or ``[R, N]``, their sums.
        lag: how many updates the behaviour parameters are behind.
        learner_time: L, of each update and learner ``[R, W]``, of each update ``[R]`` or of all.
        barrier: ``"round"``: all environments wait at the end of each round until the slowest has
            arrived, as in the paper; ``"step"``: at the end of each step, as in vectorised
            environments (needs ``[R, N, T]``); None: nobody waits for anybody (I4). Environments of
            several learners wait for those of their own learner alone.
        learners: W; the first N/W environments are those of the first, and so on.
        exchange_time: X, of each update ``[R]`` or of all, such as `exchange_time` gives.

    Raises:
        TypeError: for a lag that is no integer, or times that are no numbers.
        ValueError: for arrays of another shape, or times that are negative or not finite.

    Example:
        16 environments with exponential step times and alpha = 5, an update as long as 1.5 mean
        steps; the share of what they would do if they never waited.

        >>> times = np.random.default_rng(2).exponential(size=(2000, 16, 5))
        >>> for barrier in ("step", "round", None):
        ...     found = timetable(times, lag=1, learner_time=1.5, barrier=barrier)
        ...     print(f"{found.share_of_ideal:.2f}")
        0.30
        0.52
        0.75
    """
    steps = _numbers("step_times", step_times)
    learner = _numbers("learner_time", learner_time)
    exchange = _numbers("exchange_time", exchange_time)
    lag = check_integer("lag", lag, least=0)
    learners = check_integer("learners", learners)
    _check_steps(steps, barrier, learners)
    rounds, n = steps.shape[:2]
    if learner.shape not in ((), (rounds,), (rounds, learners)):
        raise ValueError(
            f"learner_time must be a number, [{rounds}] or [{rounds}, {learners}], got "
            f"{learner.shape}"
        )
    if exchange.shape not in ((), (rounds,)):
        raise ValueError(f"exchange_time must be a number or [{rounds}], got {exchange.shape}")
    given = {"step_times": steps, "learner_time": learner, "exchange_time": exchange}
    for name, values in given.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(f"{name} must be finite and not negative")
    if learner.ndim == 1:
        learner = learner[:, None]
    learner = np.broadcast_to(learner, (rounds, learners))
    exchange = np.broadcast_to(exchange, (rounds,))
    # Environments by their learner from here on: [R, W, N/W], or [R, W, N/W, T].
    steps = steps.reshape(rounds, learners, n // learners, *steps.shape[2:])
    work = steps.sum(3) if steps.ndim == 4 else steps
    taken = work
    if barrier == "step":
        taken = np.broadcast_to(steps.max(2).sum(2)[:, :, None], work.shape)
    opened = np.zeros(rounds + lag + 1)
    started, finished, learned = np.empty_like(work), np.empty_like(work), np.empty(rounds)
    free, updated = np.zeros(work.shape[1:]), 0.0  # when all are done with the round before
    for j in range(rounds):
        arrived = free.max(1, keepdims=True) if barrier else free
        started[j] = np.maximum(arrived, opened[j])  # I4
        free = finished[j] = started[j] + taken[j]
        ready = np.maximum(updated, free.max(1)) + learner[j]  # I3
        updated = learned[j] = ready.max() + exchange[j]
        opened[j + lag + 1] = updated
    by_env = [each.reshape(rounds, n) for each in (started, finished, work)]
    return Timetable(opened[:rounds], by_env[0], by_env[1], learned, by_env[2])


def _finite(name: str, value: Any, *, above_0: bool = False) -> float:
    number = check_number(name, value, least=0)
    if number == math.inf or (above_0 and number == 0):
        least = "positive" if above_0 else "not negative"
        raise ValueError(f"{name} must be {least} and finite, got {value!r}")
    return number


def _numbers(name: str, values: npt.ArrayLike) -> Times:
    found = np.asarray(values)
    if found.dtype.kind not in "biuf":
        raise TypeError(f"{name} must be numbers, got {values!r}")
    return found.astype(np.float64, copy=False)


def _check_steps(steps: Times, barrier: str | None, learners: int) -> None:
    if steps.ndim not in (2, 3) or 0 in steps.shape:
        raise ValueError(
            "step_times must be of shape [rounds, environments] or [rounds, environments, alpha], "
            f"none of them 0; got {steps.shape}"
        )
    if barrier not in (None, "round", "step"):
        raise ValueError(f"barrier must be None, 'round' or 'step', got {barrier!r}")
    if barrier == "step" and steps.ndim == 2:
        raise ValueError(
            "barrier='step' needs the time of each step, step_times of shape [rounds, "
            f"environments, alpha]; got {steps.shape}"
        )
    if steps.shape[1] % learners:
        raise ValueError(
            f"{steps.shape[1]} environments can't be shared out equally among {learners} learners: "
            "make their number a multiple"
        )


def _gamma_upper_quantile(tail: float, shape: int) -> float:
    """The x that a Gamma variable of integer shape and scale 1 exceeds with probability ``tail``.

    Of integer shape it exceeds x if a Poisson variable of mean x is below the shape: a sum of
    positive terms, so that small tails lose no digits.
    """
    counts = np.arange(shape)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, shape)))])

    def exceeds(x: float) -> float:
        logs = counts * math.log(x) - x - log_factorials
        top = logs.max()
        return math.exp(top) * float(np.exp(logs - top).sum())

    low, high = 0.0, 2.0 * shape
    while exceeds(high) > tail:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if exceeds(middle) > tail else (low, middle)
    return (low + high) / 2
