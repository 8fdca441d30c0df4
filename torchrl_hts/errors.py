"""The exceptions of torchrl_hts.

HTSError
├── CannotSaveError the state of an environment can't be saved as a whole
├── ProtocolError   an event that the schedule does not allow: a fault of this package
├── PolicyError     the policy can't be run in batches that keep its rows independent
└── WorkerError     an executor or an actor failed; carries which one and its traceback
"""

from __future__ import annotations

__all__ = ["CannotSaveError", "HTSError", "PolicyError", "ProtocolError", "WorkerError"]


class HTSError(Exception):
    """Base of every error that torchrl_hts defines."""


class CannotSaveError(HTSError, TypeError):
    """The state of an environment can't be saved as a whole; the message says what of it."""


class ProtocolError(HTSError, RuntimeError):
    """An event came that the schedule does not allow in its present state."""


class PolicyError(HTSError, ValueError):
    """The policy can't be run as the collector needs it; the message says what to change."""


class WorkerError(HTSError, RuntimeError):
    """An executor or an actor failed.

    Args:
        message: what happened, for people.
        worker: the worker's name, such as ``"executor 3"``.
        env_indices: the environments that the worker was concerned with.
        remote_traceback: the traceback as the worker wrote it, or ``""`` if it was killed.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str,
        env_indices: tuple[int, ...] = (),
        remote_traceback: str = "",
    ) -> None:
        self.worker = worker
        self.env_indices = env_indices
        self.remote_traceback = remote_traceback
        super().__init__(
            f"{message}\n\n{remote_traceback.rstrip()}" if remote_traceback else message
        )
