"""The workers of one collector at work, and what is done when one of them fails."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from torchrl_hts._actor.messages import StartActor
from torchrl_hts._executor.messages import Start, StartExecutor, Unsaved
from torchrl_hts._rounds.exchange import SAVE, STOP, LearnerPort
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.replies import Stopped
from torchrl_hts._rounds.shared_memory import Counter
from torchrl_hts._rounds.units import named, numbers
from torchrl_hts._supervision.progress import at_work
from torchrl_hts._supervision.restarts import Restarts
from torchrl_hts._supervision.workers import Workers
from torchrl_hts.errors import Failure, WorkerError, WorkerId

__all__ = ["Seeds", "Supervisor"]

_TOLD = (Failure.RAISED, Failure.INVALID, Failure.OUT_OF_MEMORY)  # by the worker itself


@dataclass(frozen=True)
class Seeds:
    """What all that is random in a run begins with.

    Attributes:
        noise: seed of the action noise.
        of_environment: the seed of an environment that is reset after a failure, or those of a
            batch, from its index, the round, and how often its executor has been replaced.
    """

    noise: int
    of_environment: Callable[[int, int, int], Start]


class Supervisor:
    """Sets workers to work and brings them to rest, any number of times.

    Args:
        workers: those of a collector, at `Stage.READY`.
        restarts: whether workers that fail are replaced.
        truncated_keys: of the flags that tell of an episode that was cut off.

    Every method raises `WorkerError` if a worker fails that is not replaced.

    Attributes:
        memory, schedule: shared.
        port: the learner's side of the exchange.
    """

    def __init__(
        self,
        workers: Workers,
        restarts: Restarts | None = None,
        truncated_keys: Sequence[Key] = (),
    ) -> None:
        self.workers = workers
        self.restarts = restarts or Restarts()
        self.memory, self.schedule = workers.shared.memory, workers.shared.schedule
        channels = workers.channels
        self.port = LearnerPort(self.schedule, channels.learner, channels.executors, workers.owner)
        self._channels = channels
        self._listener = workers.listener
        self._seeds: Seeds | None = None
        self._truncated_keys = truncated_keys

    # Running.

    def run(
        self,
        starts: Sequence[Start],
        seeds: Seeds,
        first_round: int,
        *,
        lent: bool,
        ahead: int,
    ) -> None:
        """Reset every environment, or put it into a saved state, and set everybody to work.

        Args:
            starts: a seed, the seeds of a batch, or a state (see `save`) per environment.
            seeds: of this run.
            first_round: the round that is to be lent next.
            lent: whether the learner still holds the batch of the round before.
            ahead: rounds from the first one on that are in their slots already.
        """
        self._seeds = seeds
        self.schedule.restart(first_round, lent=lent, ahead=ahead)
        for inbox in self._channels.inboxes:
            inbox.read_ready()
        self.port.count_anew(ahead)
        self._go(dict(enumerate(starts)))

    def _go(self, starts: Mapping[int, Start]) -> None:
        """Let everybody work; environments that are in ``starts`` begin anew."""
        self._listener.forget()
        failures: list[WorkerError] = []
        for worker in [*self.workers.actors, *self.workers.executors]:
            message: object = StartActor(self.seeds.noise)
            if worker.id.kind == "executor":
                own = self.workers.environments(worker.id)
                message = StartExecutor({env: starts[env] for env in own if env in starts})
            try:
                self._listener.send(worker, message)
            except WorkerError as failure:
                failures.append(failure)
        if failures:
            self._replace_failed(failures[0])

    @property
    def seeds(self) -> Seeds:
        """Those of the run that is on, or was last."""
        if self._seeds is None:
            raise RuntimeError("nobody has been set to work: call run() first")
        return self._seeds

    def stop(self) -> None:
        """Bring everybody to rest: executors after the step they are at, then the actors."""
        self._refill(self._bring_to_rest({}))

    def save(self) -> list[bytes] | str:
        """The state of each environment, all of them parked; or why they can't be saved."""
        while True:
            for inbox in self._channels.executors:
                inbox.post([SAVE])
            try:
                messages = self.workers.receive_all(self.workers.executors)
                break
            except WorkerError as failure:
                self._replace_failed(failure)
        states: dict[int, bytes] = {}
        for message in messages:
            if isinstance(message, Unsaved):
                own = numbers(message.env_indices, self.memory.layout.first_env)
                return f"{named(own)}: {message.why}"
            states.update(message.states)
        return [states[env] for env in sorted(states)]

    def wait_for_round(self, round_: int) -> None:
        """Sleep until a round is full, or a worker has failed that is not replaced."""
        self._listener.forget()
        self.port.hear()
        while not self.port.has_heard_all(round_):
            try:
                self._listener.wait(self._owing)
            except WorkerError as failure:
                self._replace_failed(failure)
            self.port.hear()

    def open_round(self) -> None:
        """Open the next round: its slot holds the new parameters."""
        self.port.open_next_round()

    # Going on after a failure.

    def _replace_failed(self, failure: WorkerError) -> None:
        """Replace a worker that has failed, and those that fail meanwhile; or raise the failure.

        The environments of a failed executor begin new episodes at the transition that they were
        at; the last one that was finished is marked as truncated. What actors had in hand is
        computed again. Nobody else notices anything but the pause.
        """
        lost = self._bring_to_rest({failure.worker_id: failure})
        self._refill(lost)
        broken = sorted(env for worker_id in lost for env in self.workers.environments(worker_id))
        self.port.restore_messages(broken, self._channels.actors)
        starts: dict[int, Start] = {}
        for env in broken:
            self._truncate(env)
            round_, _ = self.schedule.position(env)
            starts[env] = self.seeds.of_environment(env, round_, self.restarts.by_env[env])
        self._go(starts)

    def _bring_to_rest(self, lost: dict[WorkerId, WorkerError]) -> dict[WorkerId, WorkerError]:
        """Wait until everybody has stopped or is lost; returns who is, with their failures."""
        for failure in list(lost.values()):
            self._lose(failure)
        # Executors first: then what is ready for the actors is all that there will be.
        for processes, stop in (
            (self.workers.executors, self._stop_executors),
            (self.workers.actors, self._stop_actors),
        ):
            waiting = {worker.id for worker in processes} - lost.keys()
            stop()
            while waiting:
                try:
                    self._wait_for_rest(waiting)
                except WorkerError as failure:
                    lost[failure.worker_id] = failure
                    self._lose(failure)
                    waiting.discard(failure.worker_id)
                    stop()  # it may have taken along what was for another actor
        return lost

    def _stop_executors(self) -> None:
        for inbox in self._channels.executors:
            inbox.post([STOP])

    def _stop_actors(self) -> None:
        self._channels.actors.post([STOP] * self.workers.num_actors)

    def _wait_for_rest(self, waiting: set[WorkerId]) -> None:
        """Return when everybody in ``waiting``, which is emptied, has said that it has stopped."""
        for worker, message in self._listener.messages(
            lambda: dict.fromkeys(waiting, self.workers.progress())
        ):
            if isinstance(message, Stopped):
                waiting.discard(worker.id)
            if not waiting:
                return

    def _lose(self, failure: WorkerError) -> None:
        """Give a failed worker up; raises its failure if it is not to be replaced."""
        if self.workers.is_closed():  # by another thread, which ends the workers
            raise failure
        # A policy that raises does so again: what it computes depends on its rows alone (I6).
        if failure.worker_kind == "actor" and failure.failure in _TOLD:
            raise failure
        if not self.restarts.allows(time.monotonic()):
            if self.restarts.enabled:
                why = f"{self.restarts.most} had been within {self.restarts.window_s:g} s"
                failure.args = (f"{failure}\n\nIt was not replaced: {why}",)
            raise failure
        worker = self.workers.process(failure.worker_id)
        # One whose environment has raised is closing all that it has.
        self._listener.dismiss(worker, politely=failure.failure in _TOLD)
        self.restarts.count(failure.worker_kind, self.workers.environments(worker.id))
        self.memory.counters[self.workers.row(worker), Counter.AT] = 0
        warnings.warn(f"a worker is replaced: {failure}", RuntimeWarning, stacklevel=2)

    def _refill(self, lost: dict[WorkerId, WorkerError]) -> None:
        """Start a new worker for each that is lost, and bring it to where the others rest."""
        missing = list(lost)
        while missing:
            worker_id = missing[0]
            try:
                self.workers.replace(worker_id)
                missing.remove(worker_id)
            except WorkerError as failure:
                lost[failure.worker_id] = failure
                self._lose(failure)
                if failure.worker_id not in missing:
                    missing.append(failure.worker_id)

    def _truncate(self, env: int) -> None:
        """Cut the trajectory of an environment off after its last transition.

        If the learner has that transition, it is the last of its batch: nothing follows it there.
        """
        layout = self.memory.layout
        round_, step = divmod(self.schedule.steps[env] - 1, layout.sync_interval)
        if round_ < self.schedule.lent:
            return
        fields = self.memory.fields(self.schedule.slot(round_))
        for key in self._truncated_keys:
            truncated, done = fields[key], fields[(*key[:-1], "done")]
            for row in layout.rows(env):
                if not done[row, step].all():
                    truncated[row, step] = done[row, step] = True

    def _owing(self) -> Mapping[WorkerId, Hashable]:
        return at_work(self.schedule, self.memory.counters, self.workers.owner)
