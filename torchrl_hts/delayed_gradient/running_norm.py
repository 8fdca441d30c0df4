"""`RunningNorm`: statistics of observations that are part of theta_j.

Axes: m observations that are counted; N environments, T steps of one batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_hts.delayed_gradient.moments import RunningMoments, parts_of, world_of
from torchrl_hts.delayed_gradient.trainer import check_is_trainer
from torchrl_hts.errors.checks import check_integer, check_positive

if TYPE_CHECKING:
    from torchrl.trainers import Trainer

    from torchrl_hts._world.world import World

__all__ = ["RunningNorm", "hold", "let_go", "norms_in", "statistics_of"]

_held: WeakSet[RunningNorm] = WeakSet()  # those that stand at theta_j, in a block


class RunningNorm(RunningMoments):
    """Normalises what it is given by running statistics: ``(x - mean) / sqrt(var + eps)``, clipped.

    A layer, to be put first in the policy, and in a critic that sees the same observations. The
    statistics are buffers. Forward passes leave them alone, in training mode too; :meth:`update`
    counts a whole batch, in the learner. So they are part of theta: every action of round j was
    taken with those of theta_j, whatever the timing. They travel with
    ``update_policy_weights_()``, and are saved, resumed and evaluated with the policy. In the block
    of a `DelayedGradient` whose module has the layer, they are those of theta_j.

    TorchRL's `VecNorm` and gymnasium's `NormalizeObservation` count in each environment by itself,
    at whatever time it steps. Numbers are those of `NormalizeObservation`, but for its first count
    of 1e-4, and float64 inside.

    Args:
        shape: of an observation.
        eps: added to the variance.
        clip: results are cut at this, both ways.
        dtype: of results; by default torch's default data type.

    Raises:
        TypeError, ValueError: for a `shape`, `eps` or `clip` that makes no sense.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torch import nn
        >>> norm = RunningNorm(1)
        >>> net = nn.Sequential(norm, nn.Linear(1, 2))  # of a policy
        >>> batch = TensorDict({"observation": torch.tensor([[[1.0], [3.0]]])}, [1, 2])
        >>> norm.update(batch)  # after `with delayed(batch)`, before update_policy_weights_()
        >>> norm.mean, norm.var, norm(torch.tensor([[4.0]]))
        (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64), tensor([[2.]]))
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        eps: float = 1e-8,
        clip: float = 10.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(_sizes(shape))
        check_positive(eps=eps, clip=clip)
        self.eps, self.clip = float(eps), float(clip)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype

    def forward(self, observation: Tensor) -> Tensor:
        """Normalise by the statistics as they are.

        Args:
            observation: ``[..., *shape]``, of any data type.
        """
        scaled = (observation.to(self.mean.dtype) - self.mean) / torch.sqrt(self.var + self.eps)
        return scaled.clamp(-self.clip, self.clip).to(self.dtype)

    def update(
        self,
        data: TensorDictBase | Sequence[TensorDictBase],
        world: World | None = None,
        *,
        key: NestedKey = "observation",
    ) -> None:
        """Count all observations of a batch; in place, so that every user of the layer sees it.

        Call it once for each batch, after `with delayed(batch)` and before
        ``update_policy_weights_()``. Padding, where ``("collector", "mask")`` is False, isn't
        counted.

        Args:
            data: a batch ``[N, T]``, or the parts that `World.parts` has cut.
            world: the learners. All count what all have gathered; with shards their number makes no
                difference to the bits.
            key: of the observations.

        Raises:
            TypeError: if it is no batch, and no list of parts.
            KeyError: if there is no such entry.
            ValueError: if observations have another shape, or are infinite.
            RuntimeError: in the block of a `DelayedGradient`, where these are those of theta_j.
        """
        if self in _held:
            raise RuntimeError(
                "inside the block of a DelayedGradient the statistics are those that gathered the "
                "batch: call update after it, before update_policy_weights_()"
            )
        values = [self._rows(part, key) for part in parts_of(data, world)]
        self.take_in(values, world, f"observations {key!r}")

    def register(
        self, trainer: Trainer, name: str = "running_norm", *, key: NestedKey = "observation"
    ) -> None:
        """Have `trainer` count every batch that it has trained with, and save the statistics.

        A batch is counted after all its epochs, and before hooks of ``post_steps``, such as that
        which hands the new weights to the collector. Of several learners, all are counted.

        Args:
            trainer: whose loss module has this layer. A `DelayedGradient` is registered before.
            name: under which the trainer saves the statistics.
            key: of the observations.

        Raises:
            TypeError: if it is no trainer.
        """
        check_is_trainer(trainer)
        trainer.register_module(name, self)
        optim_steps = trainer.optim_steps

        # Wrapped, as by `DelayedGradient`: hooks of post_steps that were registered before, such as
        # a trainer's own, would hand on weights with the statistics of the batch before.
        @functools.wraps(optim_steps)
        def counted_optim_steps(batch: TensorDictBase) -> None:
            optim_steps(batch)
            self.update(batch, world_of(trainer), key=key)

        trainer.optim_steps = counted_optim_steps

    def _rows(self, part: TensorDictBase, key: NestedKey) -> Tensor:
        """The observations of a part, ``[m, *shape]``."""
        value: Tensor | None = part.get(key, None)
        if value is None:
            known = ", ".join(map(repr, part.keys(include_nested=True, leaves_only=True)))
            raise KeyError(f"the batch has no {key!r}; give update the key of one of {known}")
        shape = self.mean.shape
        if value.shape[part.ndim :] != shape:
            raise ValueError(
                f"expected observations {key!r} of shape {tuple(shape)}, got "
                f"{tuple(value.shape[part.ndim :])}: give RunningNorm that shape"
            )
        mask = part.get(("collector", "mask"), None)
        rows: Tensor = value.flatten(0, part.ndim - 1) if mask is None else value[mask.bool()]
        return rows

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{tuple(self.mean.shape)}, eps={self.eps}, clip={self.clip}"


def _sizes(shape: Any) -> tuple[int, ...]:
    """The shape of an observation, from one size or several."""
    sizes = shape if isinstance(shape, Sequence) else [shape]
    return tuple(check_integer("shape", size) for size in sizes)


def norms_in(module: nn.Module) -> list[RunningNorm]:
    """The layers that a module has, each once.

    TorchRL's losses keep their networks beside their parameters, where `modules` doesn't look.
    """
    own = list(module.modules())
    found = own.copy()
    for each in own:
        for beside in vars(each).values():
            if isinstance(beside, nn.Module):
                found += beside.modules()
    return list(dict.fromkeys(m for m in found if isinstance(m, RunningNorm)))


def statistics_of(module: nn.Module, norms: Sequence[RunningNorm]) -> dict[str, Tensor]:
    """The buffers of a module's layers, by the names that `DelayedGradient` saves them under.

    Raises:
        ValueError: if the module computes with others, since it was moved after a loss was made.
    """
    if not norms:
        return {}
    own = {buffer.data_ptr() for buffer in module.buffers()}
    if not own >= {norm.mean.data_ptr() for norm in norms}:
        raise ValueError(
            "the loss module has copies of a RunningNorm's statistics: move networks to their "
            "device before the loss is made of them"
        )
    _refuse_targets(module, norms)
    return {
        f"running_norm.{index}.{name}": buffer
        for index, norm in enumerate(norms)
        for name, buffer in norm.named_buffers()
    }


def _refuse_targets(module: nn.Module, norms: Sequence[RunningNorm]) -> None:
    """Raise ValueError for target networks of a loss with a layer, which nobody would count for."""
    own = {norm.mean.data_ptr() for norm in norms}
    shapes = {norm.mean.shape for norm in norms}
    for name, buffer in module.named_buffers():
        is_mean = name.rpartition(".")[2] == "mean" and buffer.dtype == torch.float64
        is_copy = "target_" in name and buffer.data_ptr() not in own
        if is_mean and is_copy and buffer.shape in shapes:
            raise ValueError(
                f"the loss has a target network with a RunningNorm of its own, {name}, whose "
                "statistics no target updater moves: use the loss without delayed networks, or "
                "normalise observations in the environments"
            )


def hold(norms: Sequence[RunningNorm]) -> None:
    """A block begins, in which the statistics are those of theta_j.

    Raises:
        RuntimeError: if they stand in another block already.
    """
    if any(norm in _held for norm in norms):
        raise RuntimeError(
            "a RunningNorm is in the block of another DelayedGradient: delay policy and critic "
            "with one of them, DelayedGradient(nn.ModuleList([policy, critic]))"
        )
    _held.update(norms)


def let_go(norms: Sequence[RunningNorm]) -> None:
    """The block ends."""
    _held.difference_update(norms)
