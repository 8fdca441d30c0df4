"""Tells where a batch is learned from, or rounds act, with other parameters than is thought.

With a lag, that is what a plain training loop does, and A2C learns worse or not at all from it
(docs/results/delay_study.md). `DelayedGradient` notes here that it is in use, and the
collector looks whether the policy is changed without it, with another lag, or asked for in a block.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

__all__ = [
    "UndelayedUpdateWarning",
    "UpdateWatch",
    "note_use",
    "refuse_shared",
    "refuse_within_block",
]


_SAMPLED = 64  # values of each parameter
_IGNORE = "warnings.filterwarnings('ignore', category=torchrl_hts.UndelayedUpdateWarning)"
_OTHERS_ACT = (
    "rounds act with the weights that update_policy_weights_ was given, which are not those of the "
    "policy, and a DelayedGradient takes its gradients at the policy's: they did not gather the "
    "batch. Act with the policy (update_policy_weights_() without arguments), and evaluate with "
    "the others, such as averaged weights. For losses that allow for it, "
    f"DelayedGradient(..., gradient_at='newest') says that it is meant, as does {_IGNORE}"
)


class UndelayedUpdateWarning(UserWarning):
    """Gradients are taken at other parameters than those that gathered the batch.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("ignore", category=UndelayedUpdateWarning)  # for PPO, say
    """


# DelayedGradients that have been entered, and at which entry of all they were last.
_in_use: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def note_use(delayed: Any) -> None:
    """A `DelayedGradient` is entered, of whatever kind: its user knows of the delay."""
    _in_use[delayed] = max(_in_use.values(), default=0) + 1


def refuse_shared(delayed: Any) -> None:
    """Raise RuntimeError where another `DelayedGradient` moves some of the same parameters.

    In the other's block they are theta_j already, and would be taken for the newest. In turns, each
    would take what the other has made of theta_j for theta_{j+lag}.
    """
    others = [user for user in _in_use if user is not delayed]
    if not others:
        return
    own, entered = set(map(id, delayed.loss_module.parameters())), _in_use.get(delayed)
    for user in others:
        if user.gradient_at != "behaviour" or user.lag == 0:
            continue
        in_turns = entered is not None and _in_use[user] > entered
        if not (user.moves_parameters or in_turns):
            continue
        if any(id(parameter) in own for parameter in user.loss_module.parameters()):
            raise RuntimeError(
                "two DelayedGradients with a lag move some of the same parameters: delay policy "
                "and critic with one of them, DelayedGradient(nn.ModuleList([policy, critic]))"
            )


def refuse_within_block(policy: nn.Module, what: str, others: Iterable[Tensor] = ()) -> None:
    """Raise RuntimeError where the policy has the parameters of a batch in place of its own.

    Args:
        policy: that is asked for its newest values.
        what: is refused.
        others: tensors that may be a learner's in place of the policy's.
    """
    moving = [user for user in _in_use if user.moves_parameters]
    given = {tensor.data_ptr() for tensor in others} if moving else set()
    if any(
        _delays(user, policy)
        or any(parameter.data_ptr() in given for parameter in user.loss_module.parameters())
        for user in moving
    ):
        raise RuntimeError(
            f"{what} within `with delayed(batch):`, where the policy has the parameters that "
            "gathered the batch, not the newest: call it after the block"
        )


def _alike(own: Tensor, other: Tensor) -> bool:
    """Whether a copy has a parameter's values, be it rounded to bfloat16."""
    return torch.allclose(own, other.to(own.dtype), rtol=4e-3, atol=1e-6, equal_nan=True)


class UpdateWatch:
    """Looks after the updates of a policy, between two batches.

    Warns once if it is updated and no `DelayedGradient` knows of it, and once if one does and
    rounds act with others' values.

    Args:
        policy: the policy that the collector was given.
        lag: of the collector.
        learns_here: False where another process learns, as with collectors of ``RayCollector``.
        off_policy: whether it learns from steps of older policies anyway.
    """

    def __init__(
        self, policy: nn.Module, lag: int, *, learns_here: bool = True, off_policy: bool = False
    ) -> None:
        self._policy = policy
        self._lag = lag
        self._watching = self._watching_others = lag > 0 and learns_here and not off_policy
        self._batches = 0
        self._parameters: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._values: list[Tensor] = []
        self._others_staged = False
        self._entries: int | None = None  # of DelayedGradients, when a batch was last handed out
        self._compares_lags = learns_here

    def staged_others(self) -> None:
        """Parameters that are not the policy's own were staged: it is a copy that learns."""
        self._others_staged = True

    def forget(self) -> None:
        """What changed so far was no update: a checkpoint was loaded."""
        self._batches, self._others_staged = 0, False

    def batch_handed_out(self, stacklevel: int, others: Sequence[Tensor] = ()) -> None:
        """A batch is handed out: look at what became of the policy since the one before.

        Args:
            stacklevel: of warnings.
            others: what the round that has just opened acts with in place of its parameters.
        """
        self._compare_lags()
        self._batches += 1
        if self._act_instead(others):
            self._watching_others = False
            warnings.warn(_OTHERS_ACT, UndelayedUpdateWarning, stacklevel=stacklevel + 1)
        if not self._watching:
            return
        changed = self._has_changed() and self._batches > 1
        others_staged, self._others_staged = self._others_staged, False
        if self._batches == 1 or not (changed or others_staged):
            return
        # Once is enough, either way: who delays the policy, or has been told, knows.
        if any(_delays(user, self._policy) for user in _in_use):
            self._watching = False
        elif changed or not _in_use:  # with a copy that learns, it may be that which is delayed
            self._watching = False
            warnings.warn(self._message(), UndelayedUpdateWarning, stacklevel=stacklevel + 1)

    def _act_instead(self, others: Sequence[Tensor]) -> bool:
        """Whether others act than the policy, and its parameters are taken for those that did.

        Copies of the policy's values are none; they are compared after batches 2, 4, 8, ... alone.
        """
        looks = self._batches > 1 and self._is_power_of_two()
        if not (others and looks and self._watching_others):
            return False
        if not any(
            user.gradient_at == "behaviour" and user.lag and _delays(user, self._policy)
            for user in _in_use
        ):
            return False
        own = self._policy.parameters()
        return not all(_alike(_sample(a), _sample(b)) for a, b in zip(own, others, strict=False))

    def _has_changed(self) -> bool:
        """Whether the policy differs from how it was seen last.

        Autograd's counters are raised by every change in place but those of fused optimizers and of
        what is done to ``.data``. So values are compared too; after batches 1, 2, 4, 8, ... alone,
        since to read them at each would be felt where environments cost nothing.
        """
        has_changed = False
        if self._is_power_of_two():
            self._parameters = [p for p in self._policy.parameters() if not p.is_inference()]
            before, self._values = self._values, list(map(_sample, self._policy.parameters()))
            has_changed = len(before) != len(self._values) or not all(
                map(torch.equal, before, self._values)
            )
        versions = [p._version for p in self._parameters]
        has_changed |= versions != self._versions
        self._versions = versions
        return has_changed

    def _is_power_of_two(self) -> bool:
        return self._batches & (self._batches - 1) == 0

    def _compare_lags(self) -> None:
        """Raise ValueError if the batch before was learned from with another lag; looks once."""
        if not (self._compares_lags and _in_use):
            self._entries = self._entries or 0
            return
        since, self._entries = self._entries, max(_in_use.values(), default=0)
        if since is None:
            return
        for user, entry in _in_use.items():
            if entry > since and _delays(user, self._policy):
                self._compares_lags = False
                if user.gradient_at == "behaviour" and user.lag != self._lag:
                    raise ValueError(
                        f"the DelayedGradient has lag={user.lag}, and the collector lag="
                        f"{self._lag}, so gradients were taken at other parameters than those "
                        "that gathered the batch: make it DelayedGradient(policy, "
                        "lag=collector.lag)"
                    )

    def _message(self) -> str:
        return (
            "the policy was updated outside of a DelayedGradient, so gradients are taken at newer "
            f"parameters than the batch's (lag={self._lag}). A2C and other on-policy losses "
            "without importance ratios must not: update inside `with delayed(batch):`, where "
            "delayed = DelayedGradient(policy, lag=collector.lag), or with a Trainer call "
            "DelayedGradient(policy).register(trainer); or collect with lag=0. For PPO, whose "
            "ratio allows for it, and off-policy losses on a replay buffer (DQN, SAC), which learn "
            "from older policies anyway, DelayedGradient(policy, lag=collector.lag, "
            f"gradient_at='newest') says that it is meant, as does {_IGNORE}"
        )


def _delays(user: Any, policy: nn.Module) -> bool:
    """Whether a `DelayedGradient` is of some of the policy's parameters."""
    own = {id(parameter) for parameter in policy.parameters()}
    return any(id(parameter) in own for parameter in user.loss_module.parameters())


def _sample(parameter: Tensor) -> Tensor:
    return parameter.detach().flatten()[:_SAMPLED].to("cpu", copy=True)
