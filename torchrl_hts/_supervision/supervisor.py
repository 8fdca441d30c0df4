"""The executors and actors of one collector at work, and what is done when one of them fails."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence

from torchrl_hts._actor.messages import StartActor
from torchrl_hts._executor.messages import StartExecutor, Unsaved
from torchrl_hts._processes.server_pool import Servers
from torchrl_hts._rounds.exchange import SAVE, STOP
from torchrl_hts._rounds.replies import Stopped
from torchrl_hts._rounds.shared_memory import Counter
from torchrl_hts._supervision.progress import at_work
from torchrl_hts._supervision.restarts import Restarts
from torchrl_hts._supervision.workers import Workers
from torchrl_hts.errors import Failure, WorkerError, WorkerId

__all__ = ["Supervisor"]

_OF_A_POLICY = (Failure.RAISED, Failure.INVALID, Failure.OUT_OF_MEMORY)


class Supervisor(Workers):
    """Workers that are set to work and brought to rest.

    Args:
        restarts: whether workers that fail are replaced.

    The other arguments are those of `Workers`. After `start_actors`: `run` and, any number of
    times, `stop` and `run`. Every method but `shutdown` raises `WorkerError` if a worker fails that
    is not replaced.
    """

    def __init__(
        self,
        num_envs: int,
        num_executors: int,
        num_actors: int,
        servers: Servers,
        *,
        restarts: Restarts | None = None,
        timeouts_s: Mapping[str, float] | None = None,
        storage_dir: str | None = None,
    ) -> None:
        self.restarts = restarts or Restarts()
        super().__init__(
            num_envs,
            num_executors,
            num_actors,
            servers,
            timeouts_s=timeouts_s,
            storage_dir=storage_dir,
        )

    # Running.

    def run(
        self,
        starts: Sequence[int | bytes],
        noise_seed: int,
        first_round: int,
        *,
        lent: bool,
        ahead: int,
        seed_of: Callable[[int, int, int], int],
    ) -> None:
        """Reset every environment, or put it into a saved state, and set everybody to work.

        Args:
            starts: a seed or a state (see `save`) per environment.
            noise_seed: seed of the action noise.
            first_round: the round that is to be lent next.
            lent: whether the learner still holds the batch of the round before.
            ahead: rounds from the first one on that are in their slots already.
            seed_of: the seed of an environment that is reset after a failure, from its index, the
                round, and how often its executor has been replaced.
        """
        self._noise_seed, self._seed_of = noise_seed, seed_of
        self.schedule.restart(first_round, lent=lent, ahead=ahead)
        for inbox in (self.actor_inbox, self.learner_inbox, *self.executor_inboxes):
            inbox.take_ready()
        self.port.restart(ahead)
        self._go(dict(enumerate(starts)))

    def _go(self, starts: Mapping[int, int | bytes]) -> None:
        """Let everybody work; environments that are in ``starts`` begin anew."""
        self._listener.forget()
        failures: list[WorkerError] = []
        for worker in [*self.actors, *self.executors]:
            message: object = StartActor(self._noise_seed)
            if worker in self.executors:
                own = self._environments_of(worker)
                message = StartExecutor({env: starts[env] for env in own if env in starts})
            try:
                self._listener.send(worker, message)
            except WorkerError as failure:
                failures.append(failure)
        if failures:
            self.recover(failures[0])

    def stop(self) -> None:
        """Bring everybody to rest: executors after the step they are at, then the actors."""
        self._refill(self._bring_to_rest({}))

    def save(self) -> list[bytes] | str:
        """The state of each environment, all of them parked; or why they can't be saved."""
        while True:
            for inbox in self.executor_inboxes:
                inbox.post([SAVE])
            try:
                messages = self._receive_all(self.executors)
                break
            except WorkerError as failure:
                self.recover(failure)
        states: dict[int, bytes] = {}
        for message in messages:
            if isinstance(message, Unsaved):
                return message.why
            states.update(message.states)
        return [states[env] for env in sorted(states)]

    def wait_full(self, round_: int) -> None:
        """Sleep until a round is full, or a worker has failed that is not replaced."""
        self._listener.forget()
        self.port.take_ready()
        while not self.port.is_full(round_):
            try:
                self._listener.wait(self._owing)
            except WorkerError as failure:
                self.recover(failure)
            self.port.take_ready()

    def release(self) -> None:
        """Open the next round: its slot holds the new parameters."""
        self.port.release()

    # Going on after a failure.

    def recover(self, failure: WorkerError) -> None:
        """Replace a worker that has failed, and those that fail meanwhile; or raise the failure.

        The environments of a failed executor begin new episodes at the transition that they were
        at; the last one that was finished is marked as truncated. What actors had in hand is
        computed again. Nobody else notices anything but the pause.
        """
        lost = self._bring_to_rest({failure.worker_id: failure})
        self._refill(lost)
        broken = [
            env for env, owner in enumerate(self.owner) if WorkerId("executor", owner) in lost
        ]
        self.port.recover(broken, self.actor_inbox)
        starts: dict[int, int | bytes] = {}
        for env in broken:
            self._truncate(env)
            round_, _ = self.schedule.position(env)
            starts[env] = self._seed_of(env, round_, self.restarts.by_env[env])
        self._go(starts)

    def _bring_to_rest(self, lost: dict[WorkerId, WorkerError]) -> dict[WorkerId, WorkerError]:
        """Wait until everybody has stopped or is lost; returns who is, with their failures."""
        for failure in list(lost.values()):
            self._lose(failure)
        # Executors first: then what is ready for the actors is all that there will be.
        for team, stop in (
            (self.executors, self._stop_executors),
            (self.actors, self._stop_actors),
        ):
            waiting = {worker.id for worker in team} - lost.keys()
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
        for inbox in self.executor_inboxes:
            inbox.post([STOP])

    def _stop_actors(self) -> None:
        self.actor_inbox.post([STOP] * self.num_actors)

    def _wait_for_rest(self, waiting: set[WorkerId]) -> None:
        """Return when everybody in ``waiting``, which is emptied, has said that it has stopped."""
        for worker, message in self._listener.messages(
            lambda: dict.fromkeys(waiting, self._progress())
        ):
            if isinstance(message, Stopped):
                waiting.discard(worker.id)
            if not waiting:
                return

    def _lose(self, failure: WorkerError) -> None:
        """Give a failed worker up; raises its failure if it is not to be replaced."""
        if self.is_closed():  # by another thread, which ends the workers
            raise failure
        # A policy that raises does so again: what it computes depends on its rows alone (I6).
        if failure.worker_kind == "actor" and failure.failure in _OF_A_POLICY:
            raise failure
        if not self.restarts.allows(time.monotonic()):
            if self.restarts.enabled:
                why = f"{self.restarts.most} had been within {self.restarts.window_s:g} s"
                failure.args = (f"{failure}\n\nIt was not replaced: {why}",)
            raise failure
        (worker,) = (w for w in self.workers if w.id == failure.worker_id)
        self._listener.dismiss(worker)
        self.restarts.count(failure.worker_kind, self._environments_of(worker))
        self.memory.counters[self._row(worker), Counter.AT] = 0
        warnings.warn(f"a worker is replaced: {failure}", RuntimeWarning, stacklevel=2)

    def _refill(self, lost: dict[WorkerId, WorkerError]) -> None:
        """Start a new worker for each that is lost, and bring it to where the others rest."""
        missing = list(lost)
        while missing:
            worker_id = missing[0]
            try:
                self._replace(worker_id)
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
            if not done[env, step].all():
                truncated[env, step] = done[env, step] = True

    def _owing(self) -> Mapping[WorkerId, Hashable]:
        return at_work(self.schedule, self.memory.counters, self.owner)
