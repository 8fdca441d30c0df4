"""What an environment's steps cost, by a short trial; and how many executors are right for that.

Random play in a process that then ends: nothing of it can reach the environments that are trained
on. Results don't depend on the number of executors (I6), so the clock may choose it.
"""

from __future__ import annotations

import pickle
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from multiprocessing.connection import Connection
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from torchrl_hts.messages import receive_object, send_object

__all__ = [
    "EnvironmentTimes",
    "GymPlay",
    "RandomPlay",
    "StepCosts",
    "executors_for",
    "run_probe",
    "time_steps",
]

# Random play goes on for so long and so many steps; less of an environment that takes its time.
_PROBE_S = 0.005
_PROBE_STEPS = 32
_PROBE_AT_MOST_S = 0.25
_PROBE_ENDS_S = 5  # where a step or a reset doesn't end at all

# An environment that uses less of a core than this waits for something, too.
_COMPUTES = 0.5
# What an executor itself takes for a step, about; and how long it may take for one of each of its
# environments before more executors pay: about what an actor takes for a batch.
_OWN_S = 10e-6
_TURN_S = 200e-6


@dataclass(frozen=True)
class EnvironmentTimes:
    """What random play of one environment took, in seconds.

    Attributes:
        steps: of each step, resets left out.
        resets: of each reset.
        used: the processor time of each step.
    """

    steps: npt.NDArray[np.float64]
    resets: npt.NDArray[np.float64]
    used: npt.NDArray[np.float64]

    @property
    def cpu_share(self) -> float:
        """The part of the steps during which a core was used.

        The slowest tenth is left out: a step that shares its core with another program is slow.
        """
        usual = np.argsort(self.steps)[: max(1, 9 * len(self.steps) // 10)]
        return min(1.0, float(self.used[usual].sum() / self.steps[usual].sum()))

    def with_resets(self, seed: int = 0) -> npt.NDArray[np.float64]:
        """Step times as an executor sees them: a reset is part of the step before it."""
        times = self.steps.copy()
        ends = np.random.default_rng(seed).permutation(len(times))[: len(self.resets)]
        times[ends] += self.resets[: len(ends)]
        return times


class RandomPlay(Protocol):
    """An environment and what it takes to play it at random."""

    def reset(self) -> None:
        """Begin an episode."""

    def choose(self) -> None:
        """Draw the next action."""

    def step(self) -> bool:
        """Make a step; returns whether the episode has ended."""


class GymPlay:
    """`RandomPlay` of a gymnasium environment."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.env = env
        env.action_space.seed(0)

    def reset(self) -> None:
        """Begin an episode."""
        self.env.reset()

    def choose(self) -> None:
        """Draw the next action."""
        self.action = self.env.action_space.sample()

    def step(self) -> bool:
        """Make a step; returns whether the episode has ended."""
        _, _, terminated, truncated, _ = self.env.step(self.action)
        return bool(terminated or truncated)


def time_steps(
    play: RandomPlay,
    seconds: float,
    *,
    least: int = 1,
    at_most_s: float = inf,
    warm_up: int = 1,
) -> EnvironmentTimes:
    """Play at random and time each step and each reset apart.

    Args:
        play: what is played.
        seconds: for how long, at least.
        least: for how many steps, at least;
        at_most_s: but for no more than one step after so many seconds.
        warm_up: steps that are made before, and not timed.

    Returns:
        `EnvironmentTimes`. A reset is part of it once for each episode that ended.
    """
    play.reset()
    for _ in range(warm_up):
        play.choose()
        if play.step():
            play.reset()
    steps: list[int] = []
    resets: list[int] = []
    used: list[int] = []
    clock, cpu_clock = time.perf_counter_ns, time.process_time_ns
    start, passed_s = clock(), 0.0
    while not steps or (passed_s < at_most_s and (passed_s < seconds or len(steps) < least)):
        play.choose()
        used_before, began = cpu_clock(), clock()
        ended = play.step()
        steps.append(max(1, clock() - began))
        used.append(cpu_clock() - used_before)
        if ended:
            began = clock()
            play.reset()
            resets.append(clock() - began)
        passed_s = (clock() - start) / 1e9
    return EnvironmentTimes(*(np.array(times) / 1e9 for times in (steps, resets, used)))


@dataclass(frozen=True)
class StepCosts:
    """What steps take.

    Attributes:
        step_s: seconds of the median step.
        cpu_share: the part of all steps during which a core is used.
    """

    step_s: float
    cpu_share: float


def executors_for(costs: StepCosts, num_envs: int, cores: int) -> int:
    """How many executors should share environments with such steps.

    As many as keep all cores busy: one per core if steps compute, more if they wait, up to one per
    environment. Fewer if steps take microseconds: one that keeps up with an actor's batches is
    enough, and where everybody has a core nobody needs to sleep (see ``watching.py``).

    Example:
        >>> executors_for(StepCosts(step_s=1e-3, cpu_share=1.0), num_envs=16, cores=4)
        4
        >>> executors_for(StepCosts(step_s=10e-3, cpu_share=0.01), num_envs=16, cores=4)
        16
        >>> executors_for(StepCosts(step_s=1e-6, cpu_share=1.0), num_envs=16, cores=4)
        1
    """
    if costs.cpu_share < _COMPUTES:
        wanted = ceil(cores / max(costs.cpu_share, 1e-3))
    else:
        turn_s = num_envs * (costs.step_s + _OWN_S)
        wanted = min(cores, max(1, round(turn_s / _TURN_S)))
    return min(num_envs, wanted)


def run_probe(control: Connection, fds: Sequence[int]) -> None:
    """Try an environment out, and tell what its steps cost.

    Answers ``"torchrl"`` and ends if it takes torch, which this process then doesn't have.

    Args:
        control: connection to the main process, which sends the pickled factory and whether torch
            may be imported.
        fds: none.
    """
    factory, torch_allowed = receive_object(control)
    env = pickle.loads(factory)()
    signal.alarm(_PROBE_ENDS_S)  # ends this process
    try:
        if isinstance(env, gym.Env):
            play: RandomPlay = GymPlay(env)
        elif torch_allowed:
            from torchrl_hts.torchrl_env import TorchRLPlay

            play = TorchRLPlay(env)
        else:
            send_object(control, ("torchrl", None, None))
            return
        times = time_steps(play, _PROBE_S, least=_PROBE_STEPS, at_most_s=_PROBE_AT_MOST_S)
    finally:
        env.close()
    costs = StepCosts(float(np.median(times.steps)), times.cpu_share)
    send_object(control, ("tried", costs, list(sys.modules)))
