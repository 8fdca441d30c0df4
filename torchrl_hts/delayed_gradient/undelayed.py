"""Tells once where a batch is learned from with other parameters than those that gathered it.

With a lag, that is what a plain training loop does, and A2C learns worse or not at all from it
(docs/results/delay_study.md). `DelayedGradient` notes here that it is in use, and the
collector looks whether the policy is changed without it.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

__all__ = ["UndelayedUpdateWarning", "UpdateWatch", "note_use"]


_SAMPLED = 64  # values of each parameter


class UndelayedUpdateWarning(UserWarning):
    """Gradients are taken at newer parameters than those that gathered the batch.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("ignore", category=UndelayedUpdateWarning)  # for PPO, say
    """


# DelayedGradients that have been entered; each has a `loss_module`.
_in_use: WeakSet[Any] = WeakSet()


def note_use(delayed: Any) -> None:
    """A `DelayedGradient` is entered, of whatever kind: its user knows of the delay."""
    _in_use.add(delayed)


class UpdateWatch:
    """Warns once if a policy is updated between two batches and no `DelayedGradient` knows of it.

    Args:
        policy: the policy that the collector was given.
        lag: of the collector.
        learns_here: False where another process learns, as with collectors of ``RayCollector``.
    """

    def __init__(self, policy: nn.Module, lag: int, *, learns_here: bool = True) -> None:
        self._policy = policy
        self._lag = lag
        self._watching = lag > 0 and learns_here
        self._seen: _Seen | None = None
        self._others_staged = False

    def staged_others(self) -> None:
        """Parameters that are not the policy's own were staged: it is a copy that learns."""
        self._others_staged = True

    def forget(self) -> None:
        """What changed so far was no update: a checkpoint was loaded."""
        self._seen, self._others_staged = None, False

    def batch_handed_out(self, stacklevel: int) -> None:
        """A batch is handed out: look at what became of the policy since the one before."""
        if not self._watching:
            return
        before, self._seen = self._seen, _Seen(self._policy)
        second = before is not None
        changed = before is not None and self._seen.differs_from(before)
        others_staged, self._others_staged = self._others_staged, False
        if not second or not (changed or others_staged):
            return
        # Once is enough, either way: who delays the policy, or has been told, knows.
        if self._policy_is_delayed():
            self._watching = False
        elif changed or not _in_use:  # with a copy that learns, it may be that which is delayed
            self._watching = False
            warnings.warn(self._message(), UndelayedUpdateWarning, stacklevel=stacklevel + 1)

    def _policy_is_delayed(self) -> bool:
        own = {id(parameter) for parameter in self._policy.parameters()}
        return any(
            id(parameter) in own for user in _in_use for parameter in user.loss_module.parameters()
        )

    def _message(self) -> str:
        return (
            "the policy was updated outside of a DelayedGradient, so gradients are taken at newer "
            f"parameters than the batch's (lag={self._lag}). A2C and other losses without "
            "importance ratios must not: update inside `with delayed(batch):`, where delayed = "
            "DelayedGradient(policy, lag=collector.lag), or with a Trainer call "
            "DelayedGradient(policy).register(trainer); or collect with lag=0. For PPO, whose "
            "ratio allows for it, DelayedGradient(policy, lag=collector.lag, "
            "gradient_at='newest') says that it is meant, as does warnings.filterwarnings("
            "'ignore', category=torchrl_hts.UndelayedUpdateWarning)"
        )


class _Seen:
    """What tells whether parameters have changed since: their counters, and some of their values.

    Autograd's counters are raised by every change in place but those of fused optimizers and of
    what is done to ``.data``.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        self._versions = [p._version for p in parameters if not p.is_inference()]
        self._values = [p.detach().flatten()[:_SAMPLED].to("cpu", copy=True) for p in parameters]

    def differs_from(self, other: _Seen) -> bool:
        if self._versions != other._versions or len(self._values) != len(other._values):
            return True
        return not all(map(torch.equal, self._values, other._values))
