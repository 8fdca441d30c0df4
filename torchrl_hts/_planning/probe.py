"""What an environment's steps cost, by a short probe.

Random play in a process that then ends, so that nothing of it is in the environments that are
trained on.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from torchrl_hts._executor.background_env import overlaps
from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.messages import NeedsTorch
from torchrl_hts._executor.own_seeds import seed_from_own_draws
from torchrl_hts._executor.spaces import own_spaces, seed_spaces
from torchrl_hts._executor.trial_observations import (
    MOST_PLAYED,
    GymReader,
    Observations,
    gym_observations,
    gym_reader,
)
from torchrl_hts._executor.vector_play import VectorPlay
from torchrl_hts._planning.costs import StepCosts
from torchrl_hts._processes.messages import receive_object, send_object, unpickled
from torchrl_hts._processes.stderr import be_silent
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array

if TYPE_CHECKING:
    from torchrl_hts._executor.torchrl_env import TorchRLDescription

__all__ = [
    "EnvironmentTimes",
    "GymPlay",
    "ProbeJob",
    "RandomPlay",
    "Tried",
    "run_probe",
    "time_steps",
]

# Random play goes on for so long and so many steps; less of an environment that takes its time.
_PROBE_S = 0.005
_PROBE_STEPS = 32
_PROBE_AT_MOST_S = 0.25
_PROBE_ENDS_S = 5  # where a step or a reset doesn't end at all


@dataclass(frozen=True)
class EnvironmentTimes:
    """What random play of one environment took, in seconds.

    Attributes:
        steps: of each step, resets left out.
        resets: of each reset.
        steps_cpu, resets_cpu: the processor time of each.
        disturbed, resets_disturbed: for each, whether another program took its core meanwhile.
        overlaps: whether one executor has several such steps under way at the same time.
    """

    steps: npt.NDArray[np.float64]
    resets: npt.NDArray[np.float64]
    steps_cpu: npt.NDArray[np.float64]
    resets_cpu: npt.NDArray[np.float64]
    disturbed: npt.NDArray[np.bool_]
    resets_disturbed: npt.NDArray[np.bool_]
    overlaps: bool = False

    @property
    def cpu_share(self) -> float:
        """The part of the steps during which a core was used."""
        counted = _undisturbed(self.disturbed)
        return min(1.0, float(self.steps_cpu[counted].sum() / self.steps[counted].sum()))

    def costs(self) -> StepCosts:
        """What a step takes, its share of the resets included."""
        counted = _undisturbed(self.disturbed)
        step_s, cpu_s = self.steps[counted].mean(), self.steps_cpu[counted].mean()
        if len(self.resets):
            counted = _undisturbed(self.resets_disturbed)
            per_step = len(self.resets) / len(self.steps)
            step_s += self.resets[counted].mean() * per_step
            cpu_s += self.resets_cpu[counted].mean() * per_step
        return StepCosts(float(step_s), min(1.0, float(cpu_s / step_s)), self.overlaps)

    def with_resets(self, seed: int = 0) -> npt.NDArray[np.float64]:
        """Step times as an executor sees them: a reset is part of the step before it."""
        times = self.steps.copy()
        ends = np.random.default_rng(seed).permutation(len(times))[: len(self.resets)]
        times[ends] += self.resets[: len(ends)]
        return times


def _undisturbed(disturbed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """What was not disturbed, or all if there is none."""
    return np.ones_like(disturbed) if disturbed.all() else ~disturbed


class RandomPlay(Protocol):
    """An environment and what it takes to play it at random."""

    def reset(self) -> None:
        """Begin an episode."""

    def choose(self) -> None:
        """Draw the next action."""

    def step(self) -> bool:
        """Make a step; returns whether the episode has ended."""


class _ObservedPlay(RandomPlay, Protocol):
    """The same, and what there was to see."""

    def observations(self) -> Observations:
        """What there was to see, after resets with further seeds."""


class GymPlay:
    """`RandomPlay` of a gymnasium environment."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.env = env
        # Steps since the reset, and what there was to see, of the first moments.
        self.played: list[tuple[int, dict[Key, Array]]] = []
        self._seed: int | None = 0  # of the first reset
        self._length = 0
        self._read: GymReader | None = None
        with contextlib.suppress(TypeError):  # which is met again, and told, where it is needed
            self._read = gym_reader(env.observation_space)
        env.action_space.seed(0)

    def reset(self) -> None:
        """Begin an episode."""
        first = self._seed is not None
        self._observation, _ = self.env.reset(seed=self._seed)
        self._seed, self._length = None, 0
        if first:
            self._note()

    def choose(self) -> None:
        """Draw the next action."""
        if self._length and len(self.played) < MOST_PLAYED:
            self._note()
        self.action = self.env.action_space.sample()

    def step(self) -> bool:
        """Make a step; returns whether the episode has ended."""
        self._observation, _, terminated, truncated, _ = self.env.step(self.action)
        self._length += 1
        return bool(terminated or truncated)

    def _note(self) -> None:
        if self._read is not None:
            with contextlib.suppress(Exception):  # likewise
                self.played.append((self._length, self._read(self._observation)))

    def observations(self) -> Observations:
        """What there was to see, after resets with further seeds."""
        return gym_observations(self.env, self.played)


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
    steps: list[tuple[int, int]] = []
    resets: list[tuple[int, int]] = []
    disturbed: list[bool] = []
    resets_disturbed: list[bool] = []
    clock, cpu_clock = time.perf_counter_ns, time.process_time_ns
    start, passed_s = clock(), 0.0
    while not steps or (passed_s < at_most_s and (passed_s < seconds or len(steps) < least)):
        play.choose()
        before, used, began = _preemptions(), cpu_clock(), clock()
        ended = play.step()
        steps.append((max(1, clock() - began), cpu_clock() - used))
        disturbed.append(_preemptions() > before)
        if ended:
            before, used, began = _preemptions(), cpu_clock(), clock()
            play.reset()
            resets.append((clock() - began, cpu_clock() - used))
            resets_disturbed.append(_preemptions() > before)
        passed_s = (clock() - start) / 1e9
    (step_s, step_cpu_s), (reset_s, reset_cpu_s) = (
        np.array(times, np.float64).reshape(-1, 2).T / 1e9 for times in (steps, resets)
    )
    flags = np.array(disturbed, bool), np.array(resets_disturbed, bool)
    return EnvironmentTimes(step_s, reset_s, step_cpu_s, reset_cpu_s, *flags)


def _preemptions() -> int:
    """How often another program was given this one's core."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@dataclass(frozen=True)
class ProbeJob:
    """To a trial of an environment: what to try. Answered by `Tried`, or by `NeedsTorch`.

    Attributes:
        factory: the pickled environment factory.
        torch_allowed: whether this process may import torch.
        env_options: keyword arguments of `TorchRLEnvironment`.
    """

    factory: bytes
    torch_allowed: bool
    env_options: Mapping[str, Any]


@dataclass(frozen=True)
class Tried:
    """From a trial of an environment, before it ends.

    Attributes:
        costs: of its steps.
        description: what it says of itself, with observations; None where it took too long.
        modules: names of all that was imported for it.
    """

    costs: StepCosts
    description: GymDescription | TorchRLDescription | None
    modules: Sequence[str]


def run_probe(control: Connection, fds: Sequence[int]) -> None:
    """Try an environment out, and tell what its steps cost.

    Raises if the environment does.

    Args:
        control: connection to the main process, which sends a `ProbeJob`.
        fds: none.
    """
    job: ProbeJob = receive_object(control)
    be_silent()  # the executors' environments will say it as well
    seed_from_own_draws()
    Generators(0).enter()  # so that the same is tried each time
    costs: StepCosts | None = None
    env = unpickled(job.factory)()
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(_PROBE_ENDS_S)
    used = time.process_time()
    try:
        play: _ObservedPlay | None = None
        description: Any = None
        if isinstance(env, gym.vector.VectorEnv):  # first, for EnvPool's are both
            play = vector = VectorPlay(env)
            description = vector.description
        elif isinstance(env, gym.Env):
            description = GymDescription(env.observation_space, env.action_space)
            own_spaces(env)
            seed_spaces(env, 0)
            play = GymPlay(env)
        elif job.torch_allowed:
            from torchrl_hts._executor.torchrl_env import TorchRLEnvironment
            from torchrl_hts._executor.torchrl_play import TorchRLPlay

            environment = TorchRLEnvironment(env, 0, **job.env_options)
            description = environment.description
            play = TorchRLPlay(environment.env)
        if play is not None:
            times = time_steps(play, _PROBE_S, least=_PROBE_STEPS, at_most_s=_PROBE_AT_MOST_S)
            costs = times.costs()
            with contextlib.suppress(Exception):  # which is met again, and told, by an executor
                description = replace(description, observations=play.observations())
    except _TooLongError:
        if costs is None:  # whether it computes or waits is known all the same
            share = min(1.0, (time.process_time() - used) / _PROBE_ENDS_S)
            costs = StepCosts(_PROBE_ENDS_S, share)
    finally:
        signal.alarm(0)
        env.close()
    # When it is closed: this process is then ended.
    if costs is None:
        send_object(control, NeedsTorch(0))
    else:
        costs = replace(costs, overlaps=overlaps(env))
        send_object(control, Tried(costs, description, list(sys.modules)))


class _TooLongError(BaseException):
    """The random play is to end; no ``except Exception`` of an environment stops it."""


def _give_up(signum: int, frame: FrameType | None) -> None:
    raise _TooLongError
