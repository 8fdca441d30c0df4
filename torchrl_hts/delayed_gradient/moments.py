"""Running mean and variance of whole batches, of all learners together.

Axes: m values that are counted, of any shape S each; n environments, T steps of one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_hts.errors.batches import check_parts

if TYPE_CHECKING:
    from torchrl.trainers import Trainer

    from torchrl_hts._world.world import World

__all__ = ["RunningMoments", "parts_of", "world_of"]


class RunningMoments(nn.Module):
    """Counts mean and variance, in buffers that `state_dict` has.

    With a world of shards the sums go through its tree, so that their bits don't depend on the
    number of learners (docs/explanation/tree_of_sums.md).

    Args:
        shape: S.

    Attributes:
        mean, var: ``S``, float64; 0 and 1 before the first batch.
        count: how many values there were, float64.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the statistics, but keep them float64, whatever the networks around them are."""
        kept = {name: buffer.clone() for name, buffer in self.named_buffers(recurse=False)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != kept[name].dtype:
                self._buffers[name] = kept[name].to(buffer.device)
        return self

    @torch.no_grad()
    def take_in(self, values: Sequence[Tensor], world: World | None, what: str) -> None:
        """Merge the values of a batch in place.

        T. F. Chan, G. H. Golub and R. J. LeVeque, *Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances*, 1979. The batch's own mean is taken first, so that values far
        from 0 lose no digits.

        Args:
            values: ``[m, *S]`` of each part of this learner.
            world: the learners; None: this one alone.
            what: the values are, for messages.

        Raises:
            ValueError: if some are infinite or NaN; nothing has been changed then.
        """
        # In one order, however the batch lies in memory.
        rows = [v.reshape(len(v), -1).to(torch.float64).contiguous() for v in values]
        sums = [torch.cat([r.sum(0), r.new_tensor([len(r)])]) for r in rows]
        total = _mean_of(sums, world)
        mean = total[:-1] / total[-1]
        squares = _mean_of([(r - mean).square().sum(0) for r in rows], world)
        var = squares / total[-1]
        if not bool(torch.isfinite(var).all()):
            raise ValueError(f"{what} can't be counted: some are infinite or NaN")
        # As many as there are exactly, whatever the mean over learners has rounded.
        parts = len(rows) if world is None else world.num_parts
        added = (total[-1] * parts).round().to(self.count.device)
        mean, var = (each.reshape(self.mean.shape).to(self.mean.device) for each in (mean, var))
        count = self.count + added
        difference = mean - self.mean
        share = added / count
        self.var.copy_(
            self.var * (self.count / count)
            + var * share
            + difference.square() * (self.count / count) * share
        )
        self.mean.add_(difference * share)
        self.count.copy_(count)


def parts_of(
    data: TensorDictBase | Sequence[TensorDictBase], world: World | None
) -> list[TensorDictBase]:
    """A batch ``[n, T]`` cut into this learner's parts, as views; or the parts that there are.

    Raises:
        TypeError: if it is neither.
        ValueError: if there are more or fewer parts than the learner has, or rows can't be shared
            out equally.
    """
    count = 1 if world is None else world.parts_per_rank
    if not isinstance(data, TensorDictBase):
        parts = check_parts(data)
        if len(parts) != count:
            raise ValueError(
                f"expected {count} parts, got {len(parts)}: give the world that has cut them"
            )
        return parts
    rows = data.shape[0]
    if rows % count:
        raise ValueError(f"{rows} rows can't be cut into {count} shards of the same size")
    return list(data.split(rows // count, 0))


def _mean_of(values: list[Tensor], world: World | None) -> Tensor:
    return values[0] if world is None else world.mean(values)


def world_of(trainer: Trainer) -> World | None:
    """The learners that a trainer's collector knows."""
    return cast("World | None", getattr(trainer.collector, "world", None))
