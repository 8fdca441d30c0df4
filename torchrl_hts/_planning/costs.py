"""How many executors and actors are right for what steps and forward passes cost.

What is collected doesn't depend on either number (I7), so the clock may choose them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np

__all__ = ["PassCosts", "StepCosts", "TeamSize", "actors_for", "executors_for", "team_for"]

# An environment that uses less of a core than this, and idles for longer than this, waits for
# something.
_COMPUTES = 0.5
_WAIT_S = 100e-6
_MOST_PER_CORE = 32  # processes cost memory, whatever they wait for
# What an executor itself takes for a step, about; and how long it may take for one of each of its
# environments before more executors pay: about what an actor takes for a batch.
_OWN_S = 10e-6
_TURN_S = 200e-6
# A step, with the executor's own part, that costs more than it does to go to sleep before it and to
# be woken: only then may there be so many executors that actors have no core to themselves.
_WORTH_WAKING_S = 70e-6
# A core that one executor is alone on may be so busy with steps that wait side by side.
_KEEPS_UP = 0.5
# A pass of an actor's share of the environments may take so much of the time in which they all make
# a step; if none can be so short, it is not to be much longer than the shortest.
_PASS_SHARE = 0.5
_NEAR_SHORTEST = 1.1


@dataclass(frozen=True)
class StepCosts:
    """What a step takes on average.

    Attributes:
        step_s: seconds, resets included.
        cpu_share: the part of them during which a core is used.
        overlaps: whether one executor has several such steps under way at the same time.
    """

    step_s: float
    cpu_share: float
    overlaps: bool = False

    @property
    def waits(self) -> bool:
        """Whether steps wait for something, rather than compute."""
        return self.cpu_share < _COMPUTES and (1 - self.cpu_share) * self.step_s > _WAIT_S


@dataclass(frozen=True)
class PassCosts:
    """What a forward pass takes of a core.

    Attributes:
        rows: numbers of rows, ascending from 1.
        times: seconds of processor time of a pass of so many, on one thread.
    """

    rows: tuple[float, ...]
    times: tuple[float, ...]

    def of_batches(self, size: int) -> PassCosts:
        """The same counted in batches of so many environments, for each of which it is one row.

        Example:
            >>> PassCosts((1, 64), (1e-3, 8e-3)).of_batches(16).time(4)
            0.008
        """
        return PassCosts(tuple(rows / size for rows in self.rows), self.times)

    def time(self, rows: float) -> float:
        """Seconds that a pass takes; of more rows than were measured, in proportion."""
        within = float(np.interp(rows, self.rows, self.times))
        return within * max(1.0, rows / self.rows[-1])


@dataclass(frozen=True)
class TeamSize:
    """Numbers of processes."""

    executors: int
    actors: int


def team_for(
    costs: StepCosts,
    num_envs: int,
    cores: int,
    time_passes: Callable[[], PassCosts | None],
    *,
    num_actors: int | None = None,
    actor_threads: int = 1,
) -> TeamSize:
    """How many executors and actors should serve environments with such steps.

    Args:
        costs: of a step.
        num_envs: environments.
        cores: that the collector may use.
        time_passes: tells what the policy costs; None if it takes nothing of the cores, or if that
            can't be told. Is called only where it matters.
        num_actors: so many, if that is given.
        actor_threads: of each actor, which leave cores to fewer actors; that passes are shorter
            with them isn't reckoned with.
    """
    executors = executors_for(costs, num_envs, cores)
    decided = (costs.waits or executors == 1) and (num_actors is not None or cores <= 2)
    passes = None if decided else time_passes()
    if passes is None:
        return TeamSize(executors, num_actors or 1)
    executors = executors_for(costs, num_envs, cores, passes.time(num_envs) / num_envs)
    if num_actors is None:
        at_once = num_envs if costs.overlaps else executors
        for_actors = (cores - 1 if costs.waits else cores - executors) // actor_threads
        num_actors = actors_for(costs, num_envs, at_once, for_actors, passes)
    return TeamSize(executors, num_actors)


def executors_for(costs: StepCosts, num_envs: int, cores: int, inference_s: float = 0.0) -> int:
    """How many executors should share environments with such steps.

    As many as keep all cores busy. If steps wait, more than there are cores, up to one per
    environment; but no more than can keep up where the steps of one executor overlap. If they
    compute, one per core, but for the share of the cores that inference takes when it keeps up. An
    executor too many takes turns with actors and learner on their cores. Fewer if steps take
    microseconds: one that keeps up with an actor's batches is enough. Where everybody has a core
    nobody needs to sleep (see ``_rounds/inbox_reader.py``), so a core is left to the actor.

    Args:
        costs: of a step.
        num_envs: environments.
        cores: that the collector may use.
        inference_s: what the policy takes of a core for each step.

    Example:
        >>> executors_for(StepCosts(step_s=1e-3, cpu_share=1.0), num_envs=16, cores=4)
        4
        >>> executors_for(StepCosts(1e-3, 1.0), num_envs=16, cores=4, inference_s=1e-3)
        2
        >>> executors_for(StepCosts(step_s=10e-3, cpu_share=0.01), num_envs=16, cores=4)
        16
        >>> executors_for(StepCosts(10e-3, 0.01, overlaps=True), num_envs=16, cores=4)
        1
        >>> executors_for(StepCosts(step_s=1e-6, cpu_share=1.0), num_envs=16, cores=4)
        1
    """
    if costs.waits:
        wanted = min(_MOST_PER_CORE * cores, ceil(cores / max(costs.cpu_share, 1e-3)))
        if costs.overlaps:
            wanted = min(wanted, max(1, ceil(num_envs * costs.cpu_share / _KEEPS_UP)))
    else:
        own_s = costs.step_s + _OWN_S
        share = cores * own_s / (own_s + inference_s)
        most = cores if own_s > _WORTH_WAKING_S else max(1, cores - 1)
        wanted = max(1, min(most, round(min(share, num_envs * own_s / _TURN_S))))
    return min(num_envs, wanted)


def actors_for(costs: StepCosts, num_envs: int, at_once: int, cores: int, passes: PassCosts) -> int:
    """How many actors should serve executors of such environments.

    The fewest that keep up. A pass of the rows that come to each is to take half of the time at
    most in which every environment steps once. If that can't be reached, the fewest whose passes
    are nearly as short as they get: more actors than that share rows that one pass answers as fast.

    Args:
        costs: of a step.
        num_envs: environments.
        at_once: how many of them step at the same time.
        cores: that executors leave to actors; there is one actor at least.
        passes: what the policy costs.

    Example:
        Environments that sleep for 10 ms, a policy that takes 0.2 ms for each row:

        >>> sleeps, passes = StepCosts(10e-3, 0.01), PassCosts((1, 64), (0.2e-3, 12.8e-3))
        >>> actors_for(sleeps, 16, 16, cores=15, passes=passes)
        1
        >>> actors_for(sleeps, 64, 64, cores=15, passes=passes)
        3
    """
    most = max(1, min(num_envs, cores))
    turn_s = num_envs / at_once * (costs.step_s + _OWN_S)
    within_s = max(_PASS_SHARE * turn_s, _NEAR_SHORTEST * passes.time(num_envs / most))
    return next(n for n in range(1, most + 1) if passes.time(num_envs / n) <= within_s)
