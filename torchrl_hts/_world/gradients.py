"""The gradients of parameters as one vector, which can be added, and back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_hts._world.draws import PartDraws

__all__ = ["LEFT_EARLY", "one_by_one", "set_gradient", "tell_of_odd"]

LEFT_EARLY = (
    "a loop over World.gradients was left before its end: run it to its end on every rank, "
    "without a break, a return or an exception that leaves it"
)


def one_by_one(
    parameters: Sequence[nn.Parameter],
    parts: Sequence[TensorDictBase],
    draws: PartDraws | None,
    found: list[Tensor],
) -> Iterator[TensorDictBase]:
    """Yield parts, and note the gradient of each when the next one is asked for.

    Args:
        parameters: whose gradients are taken.
        parts: of a batch.
        draws: seed torch's generators for each part, if they are to be seeded.
        found: gets the gradients, as `flat_gradient` gives them.
    """
    for index, part in enumerate(parts):
        for p in parameters:
            p.grad = None
        with nullcontext() if draws is None else draws.of(index, parameters[0].device):
            yield part
        found.append(flat_gradient(parameters))


def flat_gradient(parameters: Sequence[nn.Parameter]) -> Tensor:
    """All gradients in one vector, and after them for each parameter whether it has one."""
    device = parameters[0].device
    if any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters):
        raise ValueError(
            "a parameter has a sparse gradient, which can't be added to those of others: make the "
            "embedding with sparse=False"
        )
    values = [
        (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(device)
        for p in parameters
    ]
    has = [float(p.grad is not None) for p in parameters]
    return torch.cat([*values, torch.tensor(has, dtype=values[0].dtype, device=device)])


def set_gradient(
    parameters: Sequence[nn.Parameter], mean: Tensor, before: Sequence[Tensor | None]
) -> None:
    """Add gradients to those that there were.

    Args:
        parameters: whose ``grad`` is set.
        mean: of what `flat_gradient` gave; of no gradient where nobody had one.
        before: what ``grad`` is added to.
    """
    offset = 0
    has = mean[-len(parameters) :].tolist()
    for p, some, earlier in zip(parameters, has, before, strict=True):
        p.grad = earlier
        if some:
            own = mean[offset : offset + p.numel()].view_as(p).to(p.device)
            p.grad = own.clone() if earlier is None else earlier + own
        offset += p.numel()


def tell_of_odd(
    mean: Tensor, own: Sequence[Tensor], gather: Callable[[Any], list[Any]], *, ranks: int
) -> None:
    """Warn of ranks whose gradients are infinite or NaN, where those of other ranks are finite.

    It is no error: whoever scales gradients skips such a step.

    Args:
        mean: over all ranks, the same on each of them.
        own: gradients of this rank's parts.
        gather: takes this rank's value and returns those of all ranks.
        ranks: how many there are; of one there is nothing to tell, and nothing is looked through.
    """
    if ranks == 1 or _is_finite(mean):
        return
    finite = gather(all(map(_is_finite, own)))  # W1: all have the same mean, and come here
    odd = [rank for rank, fine in enumerate(finite) if not fine]
    if 0 < len(odd) < len(finite):
        many = "s" * (len(odd) > 1)
        warnings.warn(
            f"the gradients of rank{many} {', '.join(map(str, odd))} alone are infinite or NaN, "
            "and so is the mean that all ranks get: look at the rewards and observations there",
            stacklevel=3,
        )


def _is_finite(values: Tensor) -> bool:
    """In one pass, without a copy; NaN is the least and the greatest."""
    return all(map(math.isfinite, values.aminmax()))
