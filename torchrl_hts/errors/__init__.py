"""The exceptions of torchrl_hts.

::

    HTSError
    ├── CannotSaveError   the state of an environment can't be saved as a whole
    ├── EnvError          an environment can't be stepped as the collector needs it
    ├── InvalidValueError an environment returned, or was to be given, what its spaces don't allow
    ├── ProtocolError     an event that the schedule does not allow: a fault of this package
    ├── PolicyError       the policy can't be run in batches that keep its rows independent
    ├── ResourceError     the system has too little of something: memory, descriptors, processes
    ├── WorkerError       an executor or an actor failed; carries which one, where, and how
    └── WorldError        ranks of a run don't agree, or one doesn't answer; the message names it
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

__all__ = [
    "CannotSaveError",
    "EnvError",
    "Failure",
    "HTSError",
    "InvalidValueError",
    "PolicyError",
    "ProtocolError",
    "ResourceError",
    "WorkerError",
    "WorkerId",
    "WorldError",
    "failure_of",
]


class HTSError(Exception):
    """Base of every error that torchrl_hts defines."""


class CannotSaveError(HTSError, TypeError):
    """The state of an environment can't be saved as a whole; the message says what of it."""


class EnvError(HTSError, ValueError):
    """An environment can't be stepped as the collector needs it; the message says what to change.

    In a worker it is told as a `WorkerError`.
    """


class InvalidValueError(HTSError, ValueError):
    """An environment returned what its spaces don't allow, or NaN; the message says which value.

    Also an action that its action space doesn't have, or that the space's data type can't hold.
    """


class ProtocolError(HTSError, RuntimeError):
    """An event came that the schedule does not allow in its present state."""


class PolicyError(HTSError, ValueError):
    """The policy can't be run as the collector needs it; the message says what to change."""


class ResourceError(HTSError, RuntimeError):
    """The system has too little of something; the message says of what, and how much is needed."""


class WorldError(HTSError, RuntimeError):
    """Ranks of a run don't agree, or one of them doesn't answer; the message names it."""


class Failure(Enum):
    """How a worker failed."""

    RAISED = "raised"  # an environment, or the policy, raised an exception
    INVALID = "invalid"  # it returned NaN, a wrong shape or data type, or can't be used at all
    OUT_OF_MEMORY = "out of memory"  # it raised for want of memory
    CRASHED = "crashed"  # its process was ended by a signal, such as SIGSEGV or SIGABRT
    KILLED = "killed"  # its process was ended by SIGKILL: by hand, or for want of memory
    EXITED = "exited"  # its process ended by itself
    HUNG = "hung"  # it made no progress for as long as `timeout_s` says


def failure_of(error: BaseException) -> Failure:
    """How code failed that raised an exception.

    Example:
        >>> failure_of(MemoryError()).name, failure_of(KeyError("wings")).name
        ('OUT_OF_MEMORY', 'RAISED')
    """
    # Torch's own error of a device, and what its allocator says on the CPU.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Failure.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return Failure.OUT_OF_MEMORY
    if isinstance(error, EnvError | InvalidValueError | PolicyError):
        return Failure.INVALID
    return Failure.RAISED


@dataclass(frozen=True)
class WorkerId:
    """Which worker it is; as text what it goes by in messages.

    Attributes:
        kind: what it does.
        index: its number among the workers of its kind; None where there is only one.

    Example:
        >>> print(WorkerId("executor", 3), WorkerId("evaluator"), sep=", ")
        executor 3, evaluator
    """

    kind: Literal[
        "executor", "actor", "evaluator", "trial of an environment", "trial of the policy"
    ]
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind} {self.index}"


def _shortened(text: str, most: int = 20_000) -> str:
    """A text without its middle if it is long; an exception may say anything."""
    if len(text) <= most:
        return text
    left_out = f"\n[{len(text) - most:,} characters left out]\n"
    return text[: most // 2] + left_out + text[-most // 2 :]


class WorkerError(HTSError, RuntimeError):
    """An executor or an actor failed.

    Args:
        message: what happened, for people.
        worker: which worker it was.
        env_indices: the environments that the worker was concerned with, by their numbers among
            those of all learners.
        remote_traceback: the traceback as the worker wrote it, or ``""`` if it was killed. Of what
            this package itself found wrong it has the last line alone.
        failure: how it failed.
        round_: the round that it was at; None if it was at none, or not known.
        step: the step within the round, where one environment is to blame.
        stepped: the environment of these that was being stepped, or that raised, or all of its
            batch; empty if there was none, or it is not known.
        exit_signal: the signal that ended it, or None.
        stderr: the last lines that it wrote to stderr.

    Every argument but the message is an attribute of the same name (``round_`` is ``round``). The
    worker is one as text, such as ``"executor 3"``, and as ``worker_id``.

    Example:
        >>> error = WorkerError("it left", worker=WorkerId("executor", 3), failure=Failure.EXITED)
        >>> error.worker, error.worker_index, error.failure.value
        ('executor 3', 3, 'exited')
    """

    def __init__(
        self,
        message: str,
        *,
        worker: WorkerId,
        env_indices: tuple[int, ...] = (),
        remote_traceback: str = "",
        failure: Failure = Failure.RAISED,
        round_: int | None = None,
        step: int | None = None,
        stepped: tuple[int, ...] = (),
        exit_signal: signal.Signals | None = None,
        stderr: str = "",
    ) -> None:
        self.worker_id = worker
        self.env_indices = env_indices
        self.remote_traceback = remote_traceback
        self.failure = failure
        self.round = round_
        self.step = step
        self.stepped = stepped
        self.exit_signal = exit_signal
        self.stderr = stderr
        parts = [message]
        if remote_traceback:
            parts.append(_shortened(remote_traceback.rstrip()))
        if stderr:
            parts.append(f"The last that {worker} wrote to stderr:\n{stderr.rstrip()}")
        super().__init__("\n\n".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled as a call with its message alone; pools of processes do pickle it.
        return Exception.__new__, (type(self), *self.args), self.__dict__

    @property
    def worker(self) -> str:
        """The worker's name, such as ``"executor 3"``."""
        return str(self.worker_id)

    @property
    def worker_kind(self) -> str:
        """``"executor"``, ``"actor"`` or ``"evaluator"``."""
        return self.worker_id.kind

    @property
    def worker_index(self) -> int | None:
        """Its number among the workers of its kind; None of an evaluator."""
        return self.worker_id.index
