"""An executor: steps whichever of its environments has an action. Never runs the policy.

Runs in a process of its own. With gymnasium environments it never imports torch. Those that can
play in the background begin their steps when their actions come. The results are taken as they
come where an environment tells when its step is over, and else one by one, in the same order.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import deque
from collections.abc import Mapping
from math import ceil
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from torchrl_hts._executor.background import BackgroundSteps
from torchrl_hts._executor.generators import threads
from torchrl_hts._executor.gym_env import GymEnvironment
from torchrl_hts._executor.making import (
    FAILURES,
    EnvironmentFailedError,
    make_environments,
    observe_first,
)
from torchrl_hts._executor.messages import (
    ExecutorJob,
    ExecutorPlan,
    Observe,
    Saved,
    Start,
    StartExecutor,
    Unsaved,
)
from torchrl_hts._processes.messages import receive_object, send_object
from torchrl_hts._processes.raised import exits_well
from torchrl_hts._rounds.event_rings import Activity, Record, recorder
from torchrl_hts._rounds.exchange import SAVE, WAKE, ExecutorPort, Inbox
from torchrl_hts._rounds.gathering import fills_cores
from torchrl_hts._rounds.inbox_reader import InboxReader
from torchrl_hts._rounds.replies import Stopped
from torchrl_hts._rounds.schedule import Phase
from torchrl_hts._rounds.shared_memory import Counter, SharedMemory
from torchrl_hts.errors import CannotSaveError

if TYPE_CHECKING:
    from torchrl_hts._executor.making import Environment

__all__ = ["StepLoop", "run_executor"]

# Environments that step faster than this are announced together, or one half of them after the
# other: it is the number of wake-ups that costs. A slower one is announced at once, so that its
# inference overlaps with the others, where there is a core for that.
_FLUSH_NS = 200_000

# Plain integers: to look a member of an enum up takes longer than to count.
_AT, _EVENTS, _RESETS = int(Counter.AT), int(Counter.EVENTS), int(Counter.RESETS)


def run_executor(control: Connection, fds: list[int]) -> None:
    """Serve environments until the control connection closes.

    Args:
        control: connection to the main process.
        fds: shared memory, own inbox (read), actors' inbox (write), learner's inbox (write).
    """
    job: ExecutorJob = receive_object(control)
    pid = os.getpid()
    environments: dict[int, Environment] = {}
    try:
        make_environments(environments, job, control)
        plan: ExecutorPlan | Observe = receive_object(control)
        if isinstance(plan, Observe):
            observe_first(environments, job, control)
            plan = receive_object(control)
        assert isinstance(plan, ExecutorPlan)
        _work(environments, plan, control, fds)
    except EnvironmentFailedError as error:
        if os.getpid() != pid:  # a fork that an environment has made, and that was to end
            os._exit(0 if exits_well(error.__cause__) else 1)
        send_object(control, error.told)
    finally:
        with contextlib.ExitStack() as closing:  # all of them, also where closing one fails
            for environment in environments.values():
                closing.callback(environment.close)
            for environment in environments.values():
                if isinstance(environment, GymEnvironment):
                    environment.begin_close()


def _work(
    environments: dict[int, Environment], plan: ExecutorPlan, control: Connection, fds: list[int]
) -> NoReturn:
    """Step from each start to the stop after it, until the control connection closes."""
    memory_fd, own, actors, learner = fds
    memory = SharedMemory(memory_fd, plan.layout)
    for environment in environments.values():
        environment.bind(memory, plan.options)
    inbox = Inbox(own, -1)
    while True:
        start: StartExecutor = receive_object(control)
        port = ExecutorPort(
            memory.schedule(plan.last_round),
            Inbox(-1, actors),
            Inbox(-1, learner),
            [*environments],
        )
        loop = StepLoop(
            environments,
            port,
            InboxReader(inbox, port.schedule, a_core_each=plan.a_core_each),
            plan.cores,
            memory.counters[plan.worker].data,
            memory.histograms[plan.worker].data,
            recorder(memory, plan.worker),
            control,
        )
        loop.start(start.starts)
        loop.serve()
        send_object(control, Stopped())


class StepLoop:
    """What lies between a start and the next stop."""

    def __init__(
        self,
        environments: dict[int, Environment],
        port: ExecutorPort,
        reader: InboxReader,
        cores: int | None,
        counters: memoryview[int],
        histogram: memoryview[int],
        record: Record | None,
        control: Connection,
    ) -> None:
        self.environments = environments
        self.port = port
        self.schedule = port.schedule
        self.reader = reader
        self.now_ns = reader.clock.now_ns
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
        tells = any(environment.tells for environment in self.background.values())
        self.told = BackgroundSteps(reader.inbox) if tells else None
        # Steps that nobody tells the end of: environments, and since when; the oldest first.
        self.begun: deque[tuple[int, int]] = deque()
        self.last_finished = 0
        # Environments whose next episode has begun in the background.
        self.between: set[int] = set()

    def start(self, starts: Mapping[int, Start]) -> None:
        """Reset environments with their seeds, or put them into their saved states."""
        for env in self.background:
            seed = starts.get(env)
            if isinstance(seed, int):
                self._begin_reset(env, seed)
        for env in self.environments:
            if env in starts:
                self._begin(env, starts[env])
            if self.schedule.phase[env] == Phase.IDLE and self.port.go_on_or_park(env):
                self._write_observation(env)
            self.port.flush()

    def _begin_reset(self, env: int, seed: int) -> None:
        self.counters[Counter.AT] = env + 1
        position = self.schedule.position(env)
        try:
            self.background[env].begin_reset(seed)
        except FAILURES as error:
            raise EnvironmentFailedError(self._rows(env), *position, error) from error
        self.counters[Counter.AT] = 0

    def _begin(self, env: int, start: Start) -> None:
        began = self.now_ns()
        self.counters[Counter.AT] = env + 1
        position = self.schedule.position(env)
        environment: Any = self.environments[env]  # takes as many seeds as it has environments
        try:
            if isinstance(start, bytes):
                environment.restore(start)
            else:
                environment.reset(start, self.schedule.steps[env])
            threads.check()
        except FAILURES as error:
            raise EnvironmentFailedError(self._rows(env), *position, error) from error
        self.counters[Counter.AT] = 0
        if self.record is not None:
            now, first = self.now_ns(), self._rows(env)[0]
            self.record(Activity.RESET, began, now, position[0], first)

    def _rows(self, env: int) -> range:
        """The environments that have one turn: several where they are a batch."""
        return self.environments[env].rows

    def serve(self) -> None:
        """Step until told to stop."""
        clock, used_ns = self.now_ns, self.reader.clock.used_ns
        counters, record = self.counters, self.record
        used_before = used_ns() - counters[Counter.CPU_NS]
        stop = False
        all_ns = 0.0  # what stepping all environments takes, by the last turn
        while not stop or self.told:
            all_parked = len(self.port.parked) == len(self.environments)
            asleep = clock()
            plays = bool(self.begun or self.told)
            words = self._read()
            awake = flushed = before = clock()
            waiting = Counter.ROUND_WAITING_NS if all_parked else Counter.WAITING_NS
            counters[Counter.BUSY_NS if plays else waiting] += awake - asleep
            if record is not None and not plays:
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
                        before - flushed > _FLUSH_NS or self.port.num_unannounced >= enough
                    ) and not fills_cores(self.schedule, counters, self.cores):
                        self.port.flush()
                        flushed = before
                elif word == WAKE:
                    for env in sorted(self.port.parked):
                        if self.port.go_on_or_park(env):
                            self._write_observation(env)
                elif word == SAVE:
                    self._save()
                else:
                    stop = True
            while self.begun:
                self._finish_oldest()
                if not stop:
                    break
            if self.told is not None:
                for env, began in self.told.over():
                    self._step(env, max(began, self.last_finished))
            # What half of them has yet to play gives the actors the time for the other half.
            if len(self.begun) <= len(self.environments) // 2:
                self.port.flush()
            turn_ns = clock() - awake
            all_ns = turn_ns / max(1, len(words)) * len(self.environments)
            counters[Counter.BUSY_NS] += turn_ns
            used = used_ns() - self.reader.looking_ns
            counters[Counter.CPU_NS] = used - used_before
        if self.told is not None:
            self.told.close()

    def _read(self) -> array[int]:
        """Wait for actions, unless steps in the background are to be finished."""
        if self.begun:
            return self.reader.inbox.read_ready()
        if not self.told:
            return self.reader.read()
        self.counters[_AT] = self.told.oldest + 1
        words = self.told.read()
        self.counters[_AT] = 0
        return words

    def _enough(self, *, waited_ns: int, all_ns: float) -> int:
        """How many observations are announced although there are more environments to step.

        Where everybody has a core, half of them: then one half is stepped while the policy runs for
        the other. But all together if actions take longer to come than all steps: then two passes
        would take longer than one and the steps.

        Args:
            waited_ns: how long the last actions were waited for.
            all_ns: what it takes to step all environments.
        """
        halves = self.reader.a_core_each and waited_ns < all_ns
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
                send_object(self.control, Unsaved(tuple(environment.rows), reason))
                return
            finally:
                self.counters[_AT] = 0
        send_object(self.control, Saved(states))

    def _write_observation(self, env: int) -> None:
        round_, t = self.schedule.position(env)
        try:
            self.environments[env].write_observation(self.schedule.slot(round_), t)
        except FAILURES as error:
            raise EnvironmentFailedError(self._rows(env), round_, t, error) from error
        self.port.pass_on(env)

    def _has_begun(self, env: int, now: int) -> bool:
        """Begin a step in the background, if the environment can."""
        round_, t = self.schedule.position(env)
        self.counters[_AT] = env + 1
        try:
            has_begun = self.background[env].begin_step(self.schedule.slot(round_), t)
            if has_begun and self.told is not None and self.background[env].tells:
                self.told.watch(env, self.background[env], now)
            elif has_begun:
                self.begun.append((env, now))
        except FAILURES as error:
            raise EnvironmentFailedError(self._rows(env), round_, t, error) from error
        self.counters[_AT] = 0
        return has_begun

    def _finish_oldest(self) -> None:
        """Wait for the step that began first, and write what came of it down."""
        env, began = self.begun.popleft()
        self._step(env, max(began, self.last_finished))

    def _step(self, env: int, began: int) -> None:
        schedule, counters = self.schedule, self.counters
        round_, t = schedule.position(env)
        environment = self.environments[env]
        counters[_AT] = env + 1
        try:
            if self.told is None:
                ended = environment.step(schedule.slot(round_), t)
            else:
                ended = self._step_beside_others(self.told, env, began)
                if env in self.between:
                    counters[_AT] = 0
                    return
        except FAILURES as error:
            raise EnvironmentFailedError(environment.rows, round_, t, error) from error
        self.last_finished = now = self.now_ns()
        self.histogram[(now - began).bit_length()] += 1
        if self.record is not None:  # before anybody can act on the step
            self.record(Activity.STEP, began, now, schedule.steps[env], environment.rows[0])
        counters[_AT] = 0
        counters[_EVENTS] += len(environment.rows)
        if ended:
            counters[_RESETS] += ended
        if self.port.finish_step(env):
            self._write_observation(env)

    def _step_beside_others(self, told: BackgroundSteps, env: int, began: int) -> int:
        """A step where others play meanwhile, or the beginning of the episode that follows on it.

        That is begun where it can be, and is then to be waited for.
        """
        if env in self.between:
            self.between.remove(env)
            self.background[env].finish_episode()
            return True
        round_, t = self.schedule.position(env)
        ended = self.environments[env].step(self.schedule.slot(round_), t)
        threads.check()
        if ended and env in self.background and self.background[env].begin_episode():
            self.between.add(env)
            told.watch(env, self.background[env], began)
        return ended
