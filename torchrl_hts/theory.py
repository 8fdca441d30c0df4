"""What throughput to expect: the paper's two claims, and the recursion of the schedule.

Source: I.-J. Liu, R. A. Yeh, A. G. Schwing, *High-Throughput Synchronous Deep RL*, NeurIPS 2020
(arXiv 2012.09849), Claims 1 and 2. The recursion is that of docs/explanation/theory.md; unlike the
claims it takes step times as they are, of any distribution, equal or not from one environment to
the next.

No torch, no processes: numbers alone. Times are in seconds, or in any other unit throughout.

Axes: R rounds, N environments, T = alpha steps of an environment and round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchrl_hts.errors.checks import check_integer

__all__ = ["Timetable", "asynchronous_latency", "rollout_time", "timetable"]

Times = npt.NDArray[np.float64]

_BISECTIONS = 200  # far more than a double has bits: the bracket closes before


def rollout_time(
    num_steps: int, num_envs: int, sync_interval: int, mean_step_s: float = 1.0
) -> float:
    """Expected time of a rollout whose environments wait for each other every ``alpha`` steps.

    Claim 1 of the paper:
    ``E[T] ~ K / (n alpha) * ((1 - g) Q(1 - 1/n) + g Q(1 - 1/(n e)))``, where Q is the quantile
    function of Gamma(alpha) times the mean step and g = 0.5772 the Euler-Mascheroni constant: the
    largest of n sums, in the limit of many.

    Assumes step times that are independent and exponential, with the same mean in every
    environment, a barrier at the end of each round, and a learner that is never waited for. From
    the exact mean it differs by less than 0.4 % for 8 environments and more with alpha >= 4, by
    -0.9 % for 16 with alpha = 1, and by -15 % at worst, for 2 with alpha = 1.

    Args:
        num_steps: K, of all environments together.
        num_envs: n, the number of environments.
        sync_interval: alpha.
        mean_step_s: mean time of a step.

    Raises:
        TypeError: for a count that is no integer.
        ValueError: for a count below 1, or a time that is negative or not finite.

    Example:
        Longer rounds even out the differences between environments: 100 steps of each of 16
        take 335 mean steps if they wait at every step, and 144 if they wait every 20.

        >>> [round(rollout_time(1600, 16, alpha)) for alpha in (1, 20, 100)]
        [335, 144, 119]
    """
    check_integer("num_steps", num_steps)
    check_integer("num_envs", num_envs)
    check_integer("sync_interval", sync_interval)
    if not 0 <= mean_step_s < math.inf:
        raise ValueError(f"mean_step_s must be finite and not negative, got {mean_step_s}")
    g = np.euler_gamma
    # The largest of one is the one; the limit is of no use there.
    slowest = float(sync_interval)
    if num_envs > 1:
        slowest = (1 - g) * _gamma_upper_quantile(1 / num_envs, sync_interval)
        slowest += g * _gamma_upper_quantile(1 / (num_envs * math.e), sync_interval)
    return num_steps / (num_envs * sync_interval) * slowest * mean_step_s


def asynchronous_latency(num_envs: int, env_rate: float, learner_rate: float) -> float:
    """Expected number of updates that data of an asynchronous method wait for: its staleness.

    Claim 2 of the paper: ``E[L] = n r / (1 - n r)``, r = l / m, the mean number in an M/M/1 queue
    that n sources of rate l fill and a learner of rate m empties; infinite for ``n r >= 1``, where
    the queue grows without end. HTS-RL's staleness is its lag, whatever the rates.

    Assumes that data come as a Poisson process, that learning takes exponential times, and that
    the queue has no bound.

    Args:
        num_envs: n, the number of environments.
        env_rate: l, batches that one environment yields per second.
        learner_rate: m, batches that the learner can take per second.

    Raises:
        TypeError: for a count that is no integer.
        ValueError: for a count below 1, or a rate that is not positive or not finite.

    Example:
        >>> [round(asynchronous_latency(n, 1.0, 20.0), 1) for n in (4, 16, 19, 20)]
        [0.2, 4.0, 19.0, inf]
    """
    check_integer("num_envs", num_envs)
    if not (0 < env_rate < math.inf and 0 < learner_rate < math.inf):
        raise ValueError(f"rates must be positive and finite, got {env_rate} and {learner_rate}")
    load = num_envs * env_rate / learner_rate
    return load / (1 - load) if load < 1 else math.inf


@dataclass(frozen=True)
class Timetable:
    """When everything happens; what `timetable` returns.

    Attributes:
        opened: ``[R]``, when each round opened; 0 for the first ``lag + 1``.
        started: ``[R, N]``, when each environment began each round.
        finished: ``[R, N]``, when it had made its alpha steps.
        learned: ``[R]``, when the update with each round was done.
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
        """Throughput over that of environments that never wait; between 0 and 1.

        A first round that nobody learns from meanwhile and a last one that nobody steps beside
        count in full: for the value of a long run take some hundred rounds.
        """
        return float(self.work.mean(1).sum()) / self.duration if self.duration else 1.0

    def steps_per_second(self, sync_interval: int) -> float:
        """Steps of all environments over the time they took.

        Args:
            sync_interval: alpha, the steps of each environment in a round.
        """
        return self.work.size * sync_interval / self.duration if self.duration else math.inf


def timetable(
    step_times: npt.ArrayLike,
    *,
    lag: int = 1,
    learner_time: npt.ArrayLike = 0.0,
    barrier: Literal["step", "round"] | None = None,
) -> Timetable:
    """Follow the schedule round by round, for given times.

    With G_ij the time that environment i takes for the steps of round j, and L_j that of update j::

        start_ij  = max(finish_i(j-1), open_j)
        finish_ij = start_ij + G_ij
        learned_j = max(learned_(j-1), max_i finish_ij) + L_j
        open_(j+lag+1) = learned_j

    Assumes nothing of the times but that they don't depend on each other's course: inference is
    part of a step or costs nothing, and everybody has a processor when it needs one.

    Args:
        step_times: ``[R, N, T]``, the time of each step; or ``[R, N]``, their sums.
        lag: how many updates the behaviour parameters are behind.
        learner_time: L, of each update ``[R]`` or of all.
        barrier: ``"round"``: all environments wait at the end of each round until the slowest has
            arrived, as in the paper; ``"step"``: at the end of each step, as in vectorised
            environments (needs ``[R, N, T]``); None: nobody waits for anybody (I4).

    Raises:
        TypeError: for a lag that is no integer.
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
    steps = np.asarray(step_times, np.float64)
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
    check_integer("lag", lag, least=0)
    rounds, n = steps.shape[:2]
    learner = np.asarray(learner_time, np.float64)
    if learner.shape not in ((), (rounds,)):
        raise ValueError(f"learner_time must be a number or [{rounds}], got {learner.shape}")
    for name, values in (("step_times", steps), ("learner_time", learner)):
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(f"{name} must be finite and not negative")
    learner = np.broadcast_to(learner, (rounds,))
    work = steps.sum(2) if steps.ndim == 3 else steps
    taken = np.broadcast_to(steps.max(1).sum(1)[:, None], work.shape) if barrier == "step" else work
    opened = np.zeros(rounds + lag + 1)
    started, finished, learned = np.empty((rounds, n)), np.empty((rounds, n)), np.empty(rounds)
    free, updated = np.zeros(n), 0.0  # when environments, and the learner, are done with the last
    for j in range(rounds):
        started[j] = np.maximum(free.max() if barrier else free, opened[j])  # I4
        free = finished[j] = started[j] + taken[j]
        updated = learned[j] = max(updated, free.max()) + learner[j]  # I3
        opened[j + lag + 1] = updated
    return Timetable(opened[:rounds], started, finished, learned, work)


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
