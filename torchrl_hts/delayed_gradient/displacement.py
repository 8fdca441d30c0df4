"""`DelayedGradient`: the displacement that an inner loop has made, applied to newer parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TrainerHookBase

from torchrl_hts.delayed_gradient.batch_version import check_version
from torchrl_hts.delayed_gradient.moving import are_infinite, move_newest, put
from torchrl_hts.delayed_gradient.running_norm import (
    RunningNorm,
    hold,
    let_go,
    norms_in,
    statistics_of,
)
from torchrl_hts.delayed_gradient.trainer import check_is_trainer, check_trainer, many_of
from torchrl_hts.delayed_gradient.undelayed import note_use, refuse_shared
from torchrl_hts.errors.checks import check_integer, check_state

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DelayedGradient", "GradientAt"]

GradientAt = Literal["behaviour", "newest"]


class DelayedGradient(TrainerHookBase):  # type: ignore[misc]  # torchrl is untyped
    """Takes a batch's gradients at the parameters that gathered it, and moves the newest by them.

    Use it as a context around everything that is done with one batch, or with a trainer:
    ``DelayedGradient(trainer.loss_module).register(trainer)``. Inside the context the parameters of
    the loss module *are* theta_j, so that values, advantages and PPO's ratios (1 at first) are
    those of the policy that acted. Outside it they are the newest ones, theta_{j+lag}: what
    evaluation, checkpoints and the collector's weight update have to see. Values are copied in
    place, so losses, value estimators and optimizers that hold the same parameters follow.

    What is moved is ``loss_module.parameters()``, and the statistics of its `RunningNorm` layers
    are those of theta_j inside the context. Other buffers (target networks) stay as they are. A
    parameter that the loss module doesn't hold is trained without delay:
    ``DelayedGradient(policy)`` delays the policy alone, and a critic with networks of its own then
    learns as it does without lag (docs/results/delay_study.md compares them). Weight decay acts at
    theta_j, as part of the update. Finish the optimizer steps of a batch inside the block: one made
    after it belongs to no round.

    With a lag of 0, or ``gradient_at="newest"``, parameters are left alone, bit for bit.

    If the block raises, the newest parameters are put back and the round isn't counted, so that the
    same batch can be tried again. The optimizer's own state isn't rolled back, nor are gradients:
    call ``optimizer.zero_grad()`` first. To give a batch up, enter an empty block for it.

    What sets parameters (bounds) belongs after the block: inside it is taken for a displacement.
    Optimizers that keep weights of their own (master weights, Lookahead) don't work with a lag.

    Args:
        loss_module: the loss, or any module that holds the parameters to delay, such as the policy.
        lag: number of updates that the behaviour parameters are behind. By default that of the
            trainer's collector after :meth:`register`, else 1, as in the paper.
        gradient_at: ``"behaviour"`` takes gradients at theta_j (the paper), ``"newest"`` at
            theta_{j+lag} (the authors' released code, Cleanba), which is a plain training loop.

    Raises:
        TypeError: if `loss_module` isn't a module or `lag` isn't an integer.
        ValueError: if `lag` is negative, `gradient_at` unknown or `loss_module` without parameters.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1, bias=False)  # loss = w**2 / 2, so the gradient at w is w
        >>> _ = nn.init.ones_(model.weight)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> delayed = DelayedGradient(model, lag=1)
        >>> for j in range(4):  # theta_{j+2} = theta_{j+1} - 0.5 * theta_j
        ...     with delayed:
        ...         theta_j = model.weight.item()
        ...         (model.weight.square().sum() / 2).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     print(f"theta_{j} = {theta_j}, theta_{j + 2} = {model.weight.item()}")
        theta_0 = 1.0, theta_2 = 0.5
        theta_1 = 1.0, theta_3 = 0.0
        theta_2 = 0.5, theta_4 = -0.25
        theta_3 = 0.0, theta_5 = -0.25
    """

    def __init__(
        self,
        loss_module: nn.Module,
        *,
        lag: int | None = None,
        gradient_at: GradientAt = "behaviour",
    ) -> None:
        if not isinstance(loss_module, nn.Module):
            raise TypeError(f"expected a module as loss_module, got {type(loss_module).__name__}.")
        if next(iter(loss_module.parameters()), None) is None:
            raise ValueError("loss_module has no parameters: there is nothing to train.")
        kinds = get_args(GradientAt)
        if not isinstance(gradient_at, str) or gradient_at not in kinds:
            raise ValueError(f"gradient_at must be one of {kinds}, got {gradient_at!r}.")
        self.loss_module = loss_module
        self.gradient_at = gradient_at
        self._lag_is_given = lag is not None
        self._lag = 1 if lag is None else check_integer("lag", lag, least=0)
        self._round = 0
        self._active = False
        # theta_i lives in slot i % len(ring). The newest parameters are the live ones between two
        # rounds; their slot is filled when a round begins.
        self._ring: list[dict[str, Tensor]] = []
        self._parameters: dict[str, Tensor] = {}
        self._norms: list[RunningNorm] = []  # those of the block

    @property
    def lag(self) -> int:
        """Number of updates that the behaviour parameters are behind."""
        return self._lag

    @property
    def moves_parameters(self) -> bool:
        """Whether the parameters are those of a batch now, and not the newest."""
        return self._active and self._depth > 1

    @property
    def round(self) -> int:
        """Index j of the batch to train on next, or being trained on inside the block."""
        return self._round

    def __call__(self, batch: TensorDictBase) -> Self:
        """Check that `batch` is the one that the next block is for: ``with delayed(batch): ...``.

        Padding, where ``("collector", "mask")`` is False, isn't looked at.

        Raises:
            TypeError: if it is no batch.
            KeyError: if it has no ``"policy_version"`` of integers.
            ValueError: if an element's version isn't :attr:`round`, or there is no step.
        """
        check_version(batch, self._round)  # I3
        return self

    def __enter__(self) -> Self:
        """Put theta_j in place of the newest parameters.

        Raises:
            RuntimeError: inside another block of this object, if another one shares parameters or
                a `RunningNorm`, or if the parameters are no longer those of the rounds before.
            ValueError: if a parameter is uninitialised (lazy).
        """
        if self._active:
            raise RuntimeError(
                "rounds don't nest: leave the block before entering the next, and enter none in "
                "the hooks of a trainer that this DelayedGradient is registered with."
            )
        norms = norms_in(self.loss_module)
        parameters = self._initialised_parameters(norms)
        if self._round == 0:
            # theta_0 = ... = theta_lag. Not in the constructor, so that weights loaded since count.
            self._allocate_ring(parameters)
        self._check_unchanged(parameters)
        if self._depth > 1:
            refuse_shared(self)
        hold(norms)
        self._norms = norms
        live, behaviour, newest = self._values()
        with torch.no_grad():
            # In place: swapping p.data leaves views stale, and autograd's version counters alone.
            torch._foreach_copy_(newest, live)
            if self._depth > 1:
                put(live, behaviour)  # I2, I3
        self._active = True
        note_use(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Apply what the block did to the newest parameters, or undo it if the block raised."""
        self._active = False
        let_go(self._norms)
        live, behaviour, newest = self._values()
        with torch.no_grad():
            if exc_type is not None:
                put(live, newest)
                return
            if self._depth > 1:
                move_newest(behaviour, live, newest, self._infinite)
                put(live, behaviour)
        self._round += 1

    def register(self, trainer: Trainer, name: str = "delayed_gradient") -> None:
        """Make `trainer` train every batch inside a checked block, and save this object's state.

        Hooks that run within ``optim_steps`` (``pre_epoch``, ``post_optim``, ...) see theta_j and
        what becomes of it. Those around it, such as ``post_steps`` with its weight update, and the
        trainer's checkpoints see the newest parameters.

        If the collector has a `World` of several learners, or shards, the trainer becomes one of
        them: gradients are averaged, frames, scalars and checkpoints are those of all.

        Args:
            trainer: trains on the batches of a collector that has a `lag`.
            name: under which the trainer saves this object.

        Raises:
            TypeError: if it is no trainer, or its collector has no `lag`.
            ValueError: if the lag given or already trained with isn't the collector's. Also if the
                trainer doesn't train these parameters, or not here, batch by batch, or has what
                several learners can't do.
            RuntimeError: if the trainer has such a hook already, or a `RunningNorm`.
        """
        lag = self._lag_in(trainer)
        if any(isinstance(module, DelayedGradient) for module in trainer._modules.values()):
            raise RuntimeError("the trainer has a DelayedGradient already: one is enough.")
        if any(isinstance(module, RunningNorm) for module in trainer._modules.values()):
            raise RuntimeError(
                "the trainer has a RunningNorm already, which counts after the block of this one: "
                "register DelayedGradient first"
            )
        many = many_of(trainer)
        trainer.register_module(name, self)
        self._lag = lag
        optim_steps = trainer.optim_steps if many is None else many.join()

        # Wrapped: hooks of the stages before and after don't get the batch that is to be checked,
        # undo nothing when a step raises, and see what the order of registration has them see.
        @functools.wraps(optim_steps)
        def delayed_optim_steps(batch: TensorDictBase) -> None:
            with self(batch):
                optim_steps(batch)

        trainer.optim_steps = delayed_optim_steps

    def state_dict(self) -> dict[str, Any]:
        """Round, lag, kind of gradient, and theta_j to theta_{j+lag-1} as ``ring.<age>.<name>``.

        The newest parameters, theta_{j+lag}, are the loss module's own and are saved with it. The
        layout is flat because one of the trainer's checkpoint formats stores nothing else well.

        Raises:
            RuntimeError: inside the block, where the parameters are no state to go on from.
        """
        self._require_idle("state_dict")
        ring = {key: value.clone() for key, value in self._past()}
        return {"round": self._round, "lag": self._lag, "gradient_at": self.gradient_at, **ring}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on, bit for bit, from where :meth:`state_dict` was called.

        The states of loss module, optimizer and collector are to be loaded too, in any order.

        Args:
            state_dict: what :meth:`state_dict` returned, of an object with the same arguments.

        Raises:
            TypeError, ValueError: if the state has another lag, kind of gradient or set of
                parameters, or isn't such a state. Nothing has been changed then.
            RuntimeError: inside the block.
        """
        self._require_idle("load_state_dict")
        check_state(state_dict, ("round", "lag", "gradient_at"))
        round_ = _count(state_dict, "round")
        found = (_count(state_dict, "lag"), str(state_dict["gradient_at"]))
        if found != (self._lag, self.gradient_at):
            raise ValueError(
                f"the state is of lag {found[0]} and gradient_at={found[1]!r}, this object of lag "
                f"{self._lag} and gradient_at={self.gradient_at!r}: construct it as it was then."
            )
        if round_ > 0:
            parameters = self._initialised_parameters(norms_in(self.loss_module))
            expected = {
                f"ring.{age}.{name}": parameter.shape
                for age in range(self._depth - 1)
                for name, parameter in parameters.items()
            }
            saved = {
                key: getattr(value, "shape", None)
                for key, value in state_dict.items()
                if str(key).startswith("ring.")
            }
            if saved != expected:
                wrong = sorted({str(key) for key, _ in saved.items() ^ expected.items()})
                raise ValueError(
                    "the state's parameters aren't those of the loss module; missing, unknown or "
                    f"of another shape: {', '.join(wrong)}."
                )
            self._allocate_ring(parameters)
        self._round = round_
        for key, value in self._past():
            value.copy_(state_dict[key])

    @property
    def _depth(self) -> int:
        """Slots of the ring; one, to undo a failed round, where parameters aren't moved."""
        return self._lag + 1 if self.gradient_at == "behaviour" else 1

    def _slot(self, age: int) -> dict[str, Tensor]:
        """Slot of theta_{j+age}, j being the present round."""
        return self._ring[(self._round + age) % self._depth]

    def _values(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The live parameters, theta_j and theta_{j+lag}, in the same order."""
        oldest, newest = self._slot(0), self._slot(self._depth - 1)
        return [*self._parameters.values()], [*oldest.values()], [*newest.values()]

    def _past(self) -> Iterator[tuple[str, Tensor]]:
        """theta_j to theta_{j+lag-1}, by the names they are saved under; none in round 0."""
        for age in range(self._depth - 1 if self._round > 0 else 0):
            for name, value in self._slot(age).items():
                yield f"ring.{age}.{name}", value

    def _allocate_ring(self, parameters: dict[str, Tensor]) -> None:
        self._parameters = parameters
        self._infinite = are_infinite(parameters.values())
        self._ring = [
            {n: p.detach().clone() for n, p in parameters.items()} for _ in range(self._depth)
        ]

    def _initialised_parameters(self, norms: Sequence[RunningNorm]) -> dict[str, Tensor]:
        # Each once, those of a shared trunk too. Statistics are counted between two blocks, so that
        # a block displaces them by 0.
        parameters: dict[str, Tensor] = dict(self.loss_module.named_parameters())
        parameters |= statistics_of(self.loss_module, norms)
        lazy = [name for name, parameter in parameters.items() if is_lazy(parameter)]
        if lazy:
            raise ValueError(
                f"parameters that are not initialised yet (lazy): {', '.join(lazy)}. Run the "
                "networks once on an example before making the loss module."
            )
        return parameters

    def _check_unchanged(self, parameters: dict[str, Tensor]) -> None:
        known = self._ring[0]
        changed = known.keys() ^ parameters.keys()
        for name in known.keys() & parameters.keys():
            now, then = parameters[name], known[name]
            kinds = [(each.shape, each.dtype, each.device) for each in (now, then)]
            if kinds[0] != kinds[1] or now is not self._parameters[name]:
                changed.add(name)
        if changed:
            names = ", ".join(sorted(changed))
            raise RuntimeError(
                "parameters were added, removed, replaced, resized or moved since the last round: "
                f"{names}. Write values in place (copy_, load_state_dict), or begin again with a "
                "new DelayedGradient and collector."
            )

    def _require_idle(self, what: str) -> None:
        if self._active:
            raise RuntimeError(f"{what} inside the block: call it between two batches.")

    def _lag_in(self, trainer: Trainer) -> int:
        """Check that the hook fits `trainer`, and return the lag to use there."""
        check_is_trainer(trainer)
        if not hasattr(trainer.collector, "lag"):
            raise TypeError(
                f"the trainer's collector, a {type(trainer.collector).__name__}, has no lag. "
                "HTSCollector is needed, whose batches have parameters of a known age."
            )
        lag = check_integer("the collector's lag", trainer.collector.lag, least=0)
        if lag != self._lag and (self._lag_is_given or self._round > 0):
            raise ValueError(
                f"DelayedGradient has lag {self._lag}, the trainer's collector {lag}. Leave the "
                "argument out, and register before the first round, to use the collector's."
            )
        check_trainer(trainer, self.loss_module)
        return lag


def _count(state_dict: Mapping[str, Any], name: str) -> int:
    return check_integer(f"state_dict[{name!r}]", state_dict[name], least=0)
