"""An executor: steps whichever of its environments has an action. Never runs the policy.

Runs in a process of its own. With gymnasium environments it never imports torch. Those that can
play in the background begin their steps when their actions come; the results are then waited for
one by one, in the same order.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_env import GymEnvironment, RowOptions
from torchrl_hts._executor.old_gym import REMEDY, is_old_gym
from torchrl_hts._executor.trial_observations import (
    Observations,
    gym_observations,
    observed,
    observed_and_restored,
)
from torchrl_hts._processes.messages import receive_object, send_object, unpickled
from torchrl_hts._processes.registrations import explaining_what_is_missing
from torchrl_hts._rounds.event_rings import Activity, Record, recorder
from torchrl_hts._rounds.exchange import SAVE, WAKE, ExecutorPort, Inbox
from torchrl_hts._rounds.gathering import fills_cores
from torchrl_hts._rounds.schedule import Phase
from torchrl_hts._rounds.shared_memory import Counter, Layout, SharedMemory
from torchrl_hts._rounds.watching import Watcher
from torchrl_hts.errors import CannotSaveError, Failure, failure_of

if TYPE_CHECKING:
    from torchrl_hts._executor.torchrl_env import TorchRLEnvironment

__all__ = ["ExecutorJob", "ExecutorPlan", "run_executor"]

# Environments that step faster than this are announced together, or one half of them after the
# other: it is the number of wake-ups that costs. A slower one is announced at once, so that its
# inference overlaps with the others, where there is a core for that.
_FLUSH_NS = 200_000

# Plain integers: to look a member of an enum up takes longer than to count.
_AT, _EVENTS, _RESETS = int(Counter.AT), int(Counter.EVENTS), int(Counter.RESETS)

_FAILURES = BaseException  # of an environment: some engines call sys.exit


@dataclass(frozen=True)
class ExecutorJob:
    """First message to an executor.

    Attributes:
        factories: pickled environment factories, and
        env_indices: the indices of what they make.
        first_env: the number of environment 0 among the environments of all learners.
        observed: whether the first environment is to be observed, if it can be put back, before
            the others are made. ``"observing"`` says that this begins.
        torch_allowed: False in a process that should not import torch: it answers ``"torchrl"``
            and ends if a factory makes a TorchRL environment.
        seed: of the collector, which what is drawn while environments are made depends on.
        env_options: keyword arguments of `TorchRLEnvironment`.
    """

    factories: tuple[bytes, ...]
    env_indices: tuple[int, ...]
    first_env: int
    observed: bool
    torch_allowed: bool
    seed: int
    env_options: dict[str, Any]


@dataclass(frozen=True)
class ExecutorPlan:
    """Second message: where everything lies.

    Attributes:
        layout: the shared memory's layout.
        last_round: the round at which the run ends; None for an endless one.
        worker: its row of counters.
        options: how rows are written.
        cores: the number of cores to keep busy; None where there are several actors: then nothing
            that took long is kept back.
        a_core_each: whether there are cores enough for all threads of executors and actors.
    """

    layout: Layout
    last_round: int | None
    worker: int
    options: RowOptions
    cores: int | None
    a_core_each: bool


def run_executor(control: Connection, fds: list[int]) -> None:
    """Serve environments until the control connection closes.

    Args:
        control: connection to the main process.
        fds: shared memory, own inbox (read), actors' inbox (write), learner's inbox (write).
    """
    memory_fd, own, actors, learner = fds
    job: ExecutorJob = receive_object(control)
    environments: dict[int, GymEnvironment | TorchRLEnvironment] = {}
    observations: Observations | None = None
    try:
        for index, factory in zip(job.env_indices, job.factories, strict=True):
            try:
                environments[index] = _make(factory, index, job)
                first = environments[index]
                if job.observed and len(environments) == 1 and isinstance(first, GymEnvironment):
                    send_object(control, ("observing", index, None))
                    observations, is_back = observed_and_restored(first.env)
                    if not is_back:
                        environments[index] = _made_anew(first, factory, job)
            except _NeedsTorchError:
                send_object(control, ("torchrl", index, None))
                receive_object(control)  # the end of the connection: another process takes over
            except _FAILURES as error:
                what = (failure_of(error), traceback.format_exc())
                send_object(control, ("failed", what, ((index,), None, None)))
                return
            send_object(control, ("made", index, None))
        descriptions: list[Any] = [env.description for env in environments.values()]
        descriptions[0] = replace(descriptions[0], observations=observations)
        send_object(control, ("described", descriptions, list(sys.modules)))
        plan: ExecutorPlan | str = receive_object(control)
        if isinstance(plan, str):  # "observe"
            first = environments[job.env_indices[0]]
            observations = observed(partial(_observations, first))
            environments[first.index] = _made_anew(first, job.factories[0], job)
            send_object(control, ("observed", observations, None))
            plan = receive_object(control)
        assert isinstance(plan, ExecutorPlan)
        memory = SharedMemory(memory_fd, plan.layout)
        for environment in environments.values():
            environment.bind(memory, plan.options)
        inbox = Inbox(own, -1)
        while True:
            starts: dict[int, int | bytes] = receive_object(control)
            port = ExecutorPort(
                memory.schedule(plan.last_round),
                Inbox(-1, actors),
                Inbox(-1, learner),
                job.env_indices,
            )
            counters = memory.counters[plan.worker].data
            histogram = memory.histograms[plan.worker].data
            record = recorder(memory, plan.worker)
            try:
                watcher = Watcher(inbox, port.schedule, a_core_each=plan.a_core_each)
                run = _Run(
                    environments, port, watcher, plan.cores, counters, histogram, record, control
                )
                run.start(starts)
                run.serve()
            except _EnvironmentError as error:
                send_object(control, ("failed", error.what, error.where))
                return
            send_object(control, ("stopped", None, None))
    finally:
        with contextlib.ExitStack() as closing:  # all of them, also where closing one fails
            for environment in environments.values():
                closing.callback(environment.close)


def _make(factory: bytes, index: int, job: ExecutorJob) -> GymEnvironment | TorchRLEnvironment:
    # What is drawn while it is made is not to depend on its neighbours, or on other learners.
    generators = Generators(job.seed, job.first_env + index)
    generators.enter()
    make = unpickled(factory)
    with explaining_what_is_missing():
        env = make()
    if isinstance(env, gym.Env):
        return GymEnvironment(env, index, generators)
    if any(c.__module__ == "torchrl.envs.common" for c in type(env).__mro__):
        if not job.torch_allowed:
            raise _NeedsTorchError
        from torchrl_hts._executor.torchrl_env import TorchRLEnvironment

        return TorchRLEnvironment(env, index, generators, **job.env_options)
    hint = f" {REMEDY}." if is_old_gym(env) else ""
    if isinstance(env, gym.vector.VectorEnv):
        hint = " Give one factory per environment: the collector does what a vector would."
    raise TypeError(
        f"create_env_fn[{index}] made a {type(env).__module__}.{type(env).__qualname__}; expected "
        f"a gymnasium.Env or a torchrl.envs.EnvBase.{hint}"
    )


def _observations(environment: GymEnvironment | TorchRLEnvironment) -> Observations:
    if isinstance(environment, GymEnvironment):
        return gym_observations(environment.env)
    return environment.observations()


def _made_anew(
    environment: GymEnvironment | TorchRLEnvironment, factory: bytes, job: ExecutorJob
) -> GymEnvironment | TorchRLEnvironment:
    """Another in the place of an environment that has been observed."""
    with contextlib.suppress(Exception):
        environment.close()
    return _make(factory, environment.index, job)


class _NeedsTorchError(Exception):
    """The factory makes a TorchRL environment, and this process shall not import torch."""


class _EnvironmentError(Exception):
    """An environment failed: how, with its traceback; which, in which round and step."""

    def __init__(self, env: int, position: tuple[int, int], error: BaseException) -> None:
        self.what: tuple[Failure, str] = (failure_of(error), traceback.format_exc())
        self.where = ((env,), *position)


class _Run:
    """What lies between a start and the next stop."""

    def __init__(
        self,
        environments: dict[int, GymEnvironment | TorchRLEnvironment],
        port: ExecutorPort,
        watcher: Watcher,
        cores: int | None,
        counters: memoryview[int],
        histogram: memoryview[int],
        record: Record | None,
        control: Connection,
    ) -> None:
        self.environments = environments
        self.port = port
        self.schedule = port.schedule
        self.watcher = watcher
        self.cores = cores
        self.counters = counters
        self.histogram = histogram
        self.record = record
        self.control = control
        self.background = {
            env: environment
            for env, environment in environments.items()
            if isinstance(environment, GymEnvironment) and environment.plays_in_background
        }
        # Environments with a step in the background, and since when; the oldest first.
        self.begun: deque[tuple[int, int]] = deque()
        self.last_finished = 0

    def start(self, starts: dict[int, int | bytes]) -> None:
        """Reset environments with their seeds, or put them into their saved states."""
        for env in self.background:
            seed = starts.get(env)
            if isinstance(seed, int):
                self._begin_reset(env, seed)
        for env in self.environments:
            if env in starts:
                self._begin(env, starts[env])
            if self.schedule.phase[env] == Phase.IDLE and self.port.start(env):
                self._offer(env)
            self.port.flush()

    def _begin_reset(self, env: int, seed: int) -> None:
        self.counters[Counter.AT] = env + 1
        position = self.schedule.position(env)
        try:
            self.background[env].begin_reset(seed)
        except _FAILURES as error:
            raise _EnvironmentError(env, position, error) from error
        self.counters[Counter.AT] = 0

    def _begin(self, env: int, start: int | bytes) -> None:
        began = time.perf_counter_ns()
        self.counters[Counter.AT] = env + 1
        position = self.schedule.position(env)
        try:
            if isinstance(start, bytes):
                self.environments[env].restore(start)
            else:
                self.environments[env].reset(start, self.schedule.steps[env])
        except _FAILURES as error:
            raise _EnvironmentError(env, position, error) from error
        self.counters[Counter.AT] = 0
        if self.record is not None:
            self.record(Activity.RESET, began, time.perf_counter_ns(), position[0], env)

    def serve(self) -> None:
        """Step until told to stop."""
        clock = time.perf_counter_ns
        counters, record = self.counters, self.record
        used_before = time.process_time_ns() - counters[Counter.CPU_NS]
        stop = False
        all_ns = 0.0  # what stepping all environments takes, by the last turn
        while not stop:
            all_parked = len(self.port.parked) == len(self.environments)
            asleep = clock()
            words = self.watcher.inbox.take_ready() if self.begun else self.watcher.take()
            awake = flushed = before = clock()
            waiting = Counter.ROUND_WAITING_NS if all_parked else Counter.WAITING_NS
            counters[waiting] += awake - asleep
            if record is not None and not self.begun:
                if all_parked:
                    round_, _ = self.schedule.position(next(iter(self.environments)))
                    record(Activity.ROUND_WAIT, asleep, awake, round_)
                else:
                    record(Activity.ACTION_WAIT, asleep, awake)
            enough = self._enough(waited_ns=awake - asleep, all_ns=all_ns)
            for word in words:
                if word < SAVE:
                    if word in self.background and self._has_begun(word, before):
                        continue
                    self._step(word, before)
                    before = clock()
                    if (
                        before - flushed > _FLUSH_NS or self.port.num_offered >= enough
                    ) and not fills_cores(self.schedule, counters, self.cores):
                        self.port.flush()
                        flushed = before
                elif word == WAKE:
                    for env in sorted(self.port.parked):
                        if self.port.start(env):
                            self._offer(env)
                elif word == SAVE:
                    self._save()
                else:
                    stop = True
            while self.begun:
                self._finish_oldest()
                if not stop:
                    break
            # What half of them has yet to play gives the actors the time for the other half.
            if len(self.begun) <= len(self.environments) // 2:
                self.port.flush()
            turn_ns = clock() - awake
            all_ns = turn_ns / max(1, len(words)) * len(self.environments)
            counters[Counter.BUSY_NS] += turn_ns
            used = time.process_time_ns() - self.watcher.looking_ns
            counters[Counter.CPU_NS] = used - used_before

    def _enough(self, *, waited_ns: int, all_ns: float) -> int:
        """How many offers are announced although there are more environments to step.

        Where everybody has a core, half of them: then one half is stepped while the policy runs for
        the other. But all together if actions take longer to come than all steps: then two passes
        would take longer than one and the steps.

        Args:
            waited_ns: how long the last actions were waited for.
            all_ns: what it takes to step all environments.
        """
        halves = self.watcher.a_core_each and waited_ns < all_ns
        return ceil(len(self.environments) / 2) if halves else len(self.environments)

    def _save(self) -> None:
        """Send the states of all environments, or why one of them can't be saved."""
        states = {}
        for env, environment in self.environments.items():
            self.counters[_AT] = env + 1
            try:
                states[env] = environment.save()
            except Exception as error:  # a failure to save is no failure of the run
                reason = str(error)
                if not isinstance(error, CannotSaveError):
                    reason = f"saving it failed with {type(error).__name__}: {error}"
                send_object(self.control, ("unsaved", f"environment {env}: {reason}", None))
                return
            finally:
                self.counters[_AT] = 0
        send_object(self.control, ("saved", states, None))

    def _offer(self, env: int) -> None:
        round_, t = self.schedule.position(env)
        try:
            self.environments[env].write_observation(self.schedule.slot(round_), t)
        except _FAILURES as error:
            raise _EnvironmentError(env, (round_, t), error) from error
        self.port.offer(env)

    def _has_begun(self, env: int, now: int) -> bool:
        """Begin a step in the background, if the environment can."""
        round_, t = self.schedule.position(env)
        self.counters[_AT] = env + 1
        try:
            has_begun = self.background[env].begin_step(self.schedule.slot(round_), t)
        except _FAILURES as error:
            raise _EnvironmentError(env, (round_, t), error) from error
        self.counters[_AT] = 0
        if has_begun:
            self.begun.append((env, now))
        return has_begun

    def _finish_oldest(self) -> None:
        """Wait for the step that began first, and offer what came of it."""
        env, began = self.begun.popleft()
        self._step(env, max(began, self.last_finished))

    def _step(self, env: int, began: int) -> None:
        schedule, counters = self.schedule, self.counters
        round_, t = schedule.position(env)
        counters[_AT] = env + 1
        try:
            ended = self.environments[env].step(schedule.slot(round_), t)
        except _FAILURES as error:
            raise _EnvironmentError(env, (round_, t), error) from error
        self.last_finished = now = time.perf_counter_ns()
        self.histogram[(now - began).bit_length()] += 1
        if self.record is not None:  # before anybody can act on the step
            self.record(Activity.STEP, began, now, schedule.steps[env], env)
        counters[_AT] = 0
        counters[_EVENTS] += 1
        if ended:
            counters[_RESETS] += 1
        if self.port.finish_step(env):
            self._offer(env)
