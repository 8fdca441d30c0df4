"""How fast a collector will be with a workload, from what its parts cost when they run alone.

Three limits are put together:

- the *schedule*, with the learner: the recursion of ``theory.py`` with step times drawn from the
  measured ones, each longer by the time that an environment waits for its action;
- *inference*: passes that take whatever became ready during the last one, so that an action takes
  a pass and, while actors are busy, half of another;
- the *cores*: a step can't be had for less processor time than stepping, inferring and learning it
  take together, over the number of cores.

It leaves out that the steps of an environment may depend on each other or on what the policy does.
It also leaves out padding of batches, the memory bandwidth that processes share, and whatever else
runs on the machine. `python -m torchrl_hts.bench` tries its recommendation out, and says how far
off it was.

Axes: R rounds, E executors, k environments of each, T = alpha steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchrl_hts._planning.costs import PassCosts, StepCosts, TeamSize, team_for
from torchrl_hts._planning.worker_counts import as_descriptors_allow
from torchrl_hts.theory import timetable

__all__ = ["Costs", "Forecast", "Setting", "forecast", "recommend"]

_DRAWS = 300_000  # of step times
_ROUNDS = (20, 300)  # simulated, at least and at most
_MOST_DRAWS = 1 << 23  # of step times; more of them are known by their mean and variance
_ITERATIONS = 200
_NEAR_BEST = 0.95
_FULLY = 0.95  # who is so busy is what limits the others

Limit = Literal["schedule", "inference", "learner", "cores"]


@dataclass(frozen=True)
class Costs:
    """What a workload's parts take, each alone; times in seconds.

    A batch of environments that steps as one is reckoned with as one of the schedule. A step is
    then one of them all, and a row of a pass has all of theirs.

    Attributes:
        step_times: ``[K]``, of single steps, with the reset in those that end an episode.
        step_cpu_share: the part of a step during which it used a core.
        executor_cpu_s: processor time of an executor for each step, beside the environment's.
        passes: of a forward pass, on one thread that has a core to itself.
        actor_cpu_s: processor time of an actor for each pass, beside the policy's.
        learner_step_s: of learning, on a core of its own, for each environment step.
        cores: that the collector may use.
        batch: environments that each step is of.
        overlaps: whether one executor has several steps under way at the same time.
    """

    step_times: npt.NDArray[np.float64]
    step_cpu_share: float
    executor_cpu_s: float
    passes: PassCosts
    actor_cpu_s: float
    learner_step_s: float
    cores: int
    batch: int = 1
    overlaps: bool = False

    @property
    def mean_step_s(self) -> float:
        """Mean time of a step, resets included."""
        return float(self.step_times.mean())

    def pass_time(self, rows: float) -> float:
        """Time that an actor takes for a pass."""
        return self.actor_cpu_s + self.passes.time(rows)

    def team(self, num_envs: int) -> TeamSize:
        """What `HTSCollector` chooses."""
        step_costs = StepCosts(self.mean_step_s, self.step_cpu_share, self.overlaps)
        wanted = team_for(step_costs, num_envs, self.cores, lambda: self.passes)
        return as_descriptors_allow(wanted)


@dataclass(frozen=True)
class Setting:
    """What a user chooses; of batches `num_envs` is their number."""

    num_envs: int
    sync_interval: int
    lag: int = 1
    num_actors: int = 1


@dataclass(frozen=True)
class Forecast:
    """What to expect of a setting.

    Attributes:
        setting: what it is of.
        steps_per_second: of all environments together.
        schedule_share: what the schedule alone leaves of the speed of executors that never wait:
            the recursion with the measured step times and learner, everything else for nothing.
        limit: what keeps it from being more: waiting for each other, inference, learning, or the
            number of cores.
    """

    setting: Setting
    steps_per_second: float
    schedule_share: float
    limit: Limit


def forecast(
    costs: Costs, setting: Setting, *, barrier: Literal["round"] | None = None, seed: int = 0
) -> Forecast:
    """Forecast the throughput of a setting.

    Args:
        costs: of the workload.
        setting: number of environments, alpha, lag and number of actors.
        barrier: ``"round"``: as if all waited for the slowest at the end of each round.
        seed: of the step times that are drawn.

    Example:
        Environments that sleep for 10 ms on average, a policy that takes 0.2 ms:

        >>> times = np.random.default_rng(0).exponential(0.01, 10_000)
        >>> costs = Costs(times, 0.0, 0.0, PassCosts((1, 16), (2e-4, 2e-4)), 0.0, 0.0, cores=2)
        >>> found = forecast(costs, Setting(num_envs=16, sync_interval=20, lag=1))
        >>> found.limit, 0.90 < found.schedule_share < 0.96
        ('schedule', True)
        >>> 0.9 < found.steps_per_second / (1600 * found.schedule_share) < 1.0
        True
    """
    n, alpha = setting.num_envs, setting.sync_interval
    executors = n if costs.overlaps else costs.team(n).executors  # as if each had one
    step_s = costs.mean_step_s + costs.executor_cpu_s
    wait_s, rows, busy = _inference(costs, setting, min(n / step_s, executors / step_s))

    rounds = int(np.clip(_DRAWS // (n * alpha), *_ROUNDS))
    each = -(-n // executors)  # environments of an executor
    drawn = min(alpha, max(1, _MOST_DRAWS // (rounds * executors * each)))
    draws = np.random.default_rng(seed).choice(costs.step_times, (rounds, executors, each, drawn))
    own = draws.sum(3)
    if drawn < alpha:  # with the mean and the variance of alpha steps
        mean_s = costs.mean_step_s
        own = alpha * mean_s + np.sqrt(alpha / drawn) * (own - drawn * mean_s)
    sums = own + alpha * costs.executor_cpu_s
    # An executor is through when it has stepped all, and the last of its environments has acted.
    stepped = sums.sum(2) * (n / (executors * each))
    taken = np.maximum(stepped, (sums + alpha * wait_s).max(2))
    learner_s = costs.learner_step_s * n * alpha
    follow = partial(timetable, lag=setting.lag, learner_time=learner_s, barrier=barrier)
    by_schedule = rounds * n * alpha / follow(taken).duration
    schedule_share = follow(own.sum(2)).share_of_ideal

    core_s = costs.mean_step_s * costs.step_cpu_share + costs.executor_cpu_s + costs.learner_step_s
    # While every core is busy an actor waits for more rows; about half of them come.
    by_cores = costs.cores / (core_s + costs.pass_time(max(rows, n / 2)) / max(rows, n / 2))
    speed = min(by_schedule, by_cores)
    limit: Limit = "schedule"
    if by_cores <= 1.001 * by_schedule:  # executors that never rest on cores that never rest
        limit = "cores"
    elif speed * costs.learner_step_s > _FULLY:
        limit = "learner"
    elif busy > _FULLY:
        limit = "inference"
    return Forecast(setting, speed * costs.batch, schedule_share, limit)


def _inference(costs: Costs, setting: Setting, most: float) -> tuple[float, float, float]:
    """How long an observation waits for its action, rows of a pass, and how busy actors are.

    The rows of a pass are those that came during the last one. As many come per second as the
    environments make steps, which take longer the longer they wait: a fixed point.

    Args:
        costs, setting: see `forecast`.
        most: steps per second that executors can make.
    """
    n, actors = setting.num_envs, setting.num_actors
    step_s = costs.mean_step_s + costs.executor_cpu_s
    rows, wait_s, busy = 1.0, 0.0, 0.0
    for _ in range(_ITERATIONS):
        pass_s = costs.pass_time(rows)
        speed = min(n / (step_s + wait_s), most)
        busy = min(1.0, speed * pass_s / (actors * rows))
        wait_s += 0.2 * (pass_s * (1 + busy / 2) - wait_s)
        rows += 0.2 * (min(float(n), max(1.0, speed * pass_s / actors)) - rows)
    return wait_s, rows, busy


def recommend(forecasts: Sequence[Forecast]) -> Forecast:
    """The least that is nearly as fast as the fastest.

    Of those within 5 % of the best: the least lag, then the fewest actors, then the fewest
    environments, then the shortest rounds. A lag above 1 is not weighed: it costs freshness, which
    is for the user to give.

    Raises:
        ValueError: if there is nothing to choose from.
    """
    modest = [each for each in forecasts if each.setting.lag <= 1] or list(forecasts)
    if not modest:
        raise ValueError("there is no forecast to choose from")
    best = max(each.steps_per_second for each in modest)
    near = [each for each in modest if each.steps_per_second >= _NEAR_BEST * best]

    def modesty(each: Forecast) -> tuple[int, ...]:
        setting = each.setting
        return setting.lag, setting.num_actors, setting.num_envs, setting.sync_interval

    return min(near, key=modesty)
