"""What a worker's failure is called: one error that says who, where, how, and with which words."""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

from torchrl_hts._processes.raised import Raised
from torchrl_hts._processes.worker_process import WorkerProcess
from torchrl_hts._rounds.replies import Failed
from torchrl_hts._rounds.schedule import Phase, Schedule
from torchrl_hts._rounds.shared_memory import Counter, SharedMemory
from torchrl_hts._rounds.units import listed, named, numbers
from torchrl_hts.errors import Failure, WorkerError

__all__ = ["Site", "died", "failed", "hung", "raised"]


@dataclass(frozen=True)
class Site:
    """Where a worker was, as the shared words tell; all None before they are shared.

    Attributes:
        env_indices: the environments that the worker serves, or works for, by their numbers among
            those of all learners.
        text: the same for people, as the end of a sentence.
        round: the round that it was at.
        step: the step that it was at, of one environment.
        stepped: the environments that it was stepping: one, or those of a batch.
    """

    env_indices: tuple[int, ...] = ()
    text: str = ""
    round: int | None = None
    step: int | None = None
    stepped: tuple[int, ...] = ()

    @classmethod
    def of_making(cls, envs: tuple[int, ...], made: Collection[int], first_env: int) -> Site:
        """Where an executor is that makes its environments.

        Args:
            envs: its environments, among this learner's.
            made: the environments that have been made, likewise.
            first_env: the number of this learner's environment 0.
        """
        left = numbers((env for env in envs if env not in made), first_env)
        return cls(numbers(envs, first_env), f" while {named(left[:1])} was made" if left else "")

    @classmethod
    def of_executor(
        cls, envs: tuple[int, ...], schedule: Schedule, memory: SharedMemory, row: int
    ) -> Site:
        """Where an executor is that has made them.

        Args:
            envs: its environments, among this learner's.
            schedule, memory: shared.
            row: its row of counters.
        """
        first_env = memory.layout.first_env
        envs = numbers(envs, first_env)
        env = int(memory.counters[row, Counter.AT]) - 1
        if env < 0:
            return cls(envs, " between two steps")
        round_, step = schedule.position(env)
        which = numbers(memory.layout.rows(env), first_env)
        is_stepped = schedule.phase[env] == Phase.ANSWERED
        doing = "stepped" if is_stepped else "reset, saved or restored"
        was = "was" if len(which) == 1 else "were"
        return cls(
            envs,
            f" while {named(which)} {was} {doing} in round {round_}, step {step}",
            round_,
            step,
            which if is_stepped else (),
        )

    @classmethod
    def of_actor(cls, schedule: Schedule, memory: SharedMemory, row: int, *, started: bool) -> Site:
        """Where an actor is; what several actors have taken is not told apart."""
        if not started:
            return cls((), " while it calibrated")
        round_ = int(memory.counters[row, Counter.AT]) - 1
        if round_ < 0:
            return cls((), " between two batches")
        taken = [unit for unit in range(schedule.num_envs) if schedule.phase[unit] == Phase.TAKEN]
        envs = numbers(memory.layout.envs(taken), memory.layout.first_env)
        rows = f", for environment(s) {listed(envs)}" if envs else ""
        return cls(envs, f" in round {round_}{rows}", round_)


def raised(worker: WorkerProcess, told: Raised, site: Site) -> WorkerError:
    """A worker's own code has raised.

    Args:
        told: what the worker says of it.
        site: where it was by the shared words.
    """
    what_follows = "; its traceback:" if told.traceback.startswith("Traceback") else ":"
    return WorkerError(
        f"{_who(worker)} failed{site.text}{what_follows}",
        worker=worker.id,
        env_indices=site.env_indices,
        remote_traceback=told.traceback,
        failure=told.failure,
        stderr=worker.stderr(),
    )


def failed(worker: WorkerProcess, told: Failed, first_env: int) -> WorkerError:
    """An environment or the policy has raised, in a worker that says so.

    Args:
        told: what the worker says.
        first_env: the number of this learner's environment 0 among those of all learners.
    """
    who = _who(worker)
    envs, round_, step = numbers(told.env_indices, first_env), told.round, told.step
    failure = told.raised.failure
    lack = " for want of memory" if failure is Failure.OUT_OF_MEMORY else ""
    if worker.id.kind == "actor":
        message = (
            f"the policy failed{lack} in round {round_}, for environment(s) {listed(envs)}, "
            f"in {who}:"
        )
    else:
        at = "while it was made" if round_ is None else f"in round {round_}, step {step}"
        message = f"{named(envs)} failed{lack} {at}, in {who}:"
    return WorkerError(
        message,
        worker=worker.id,
        env_indices=envs,
        remote_traceback=told.raised.traceback,
        failure=failure,
        round_=round_,
        step=step,
        stepped=() if step is None else envs,
        stderr=worker.stderr(),
    )


def died(worker: WorkerProcess, site: Site) -> WorkerError:
    """A worker's process has ended without a word."""
    end = worker.describe_end()
    status = worker.exit_status(0)
    by = signal.Signals(-status) if status is not None and status < 0 else None
    failure = Failure.EXITED
    if by is not None:
        failure = Failure.KILLED if by == signal.SIGKILL else Failure.CRASHED
    return _without_traceback(worker, site, failure, end, by)


def hung(worker: WorkerProcess, site: Site, timeout_s: float) -> WorkerError:
    """A worker has made no progress for too long, and is ended; its stderr tells where it was."""
    worker.abort(1.0)
    worker.kill()
    end = f"made no progress for {timeout_s:g} s (timeout_s)"
    return _without_traceback(worker, site, Failure.HUNG, end, None)


def _without_traceback(
    worker: WorkerProcess, site: Site, failure: Failure, end: str, by: signal.Signals | None
) -> WorkerError:
    serving = ""
    if worker.id.kind == "executor":
        serving = f", which steps environment(s) {listed(site.env_indices)},"
    return WorkerError(
        f"{_who(worker)}{serving} {end}{site.text}",
        worker=worker.id,
        env_indices=site.env_indices,
        failure=failure,
        round_=site.round,
        step=site.step,
        stepped=site.stepped,
        exit_signal=by,
        stderr=worker.stderr(),
    )


def _who(worker: WorkerProcess) -> str:
    return f"{worker.name} (pid {worker.pid})"
