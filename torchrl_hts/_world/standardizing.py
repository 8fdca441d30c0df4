"""Values with mean 0 and deviation 1, of one part or of all parts together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["standardized", "standardized_alone"]

_POWERS = 2 ** torch.arange(40, device="cpu")  # up to more numbers than fit into memory


def standardized_alone(value: Tensor) -> Tensor:
    """By the very terms that TorchRL's losses use; a single number stays as it is."""
    if value.numel() <= 1:
        return value
    return (value - value.mean()) / value.std().clamp_min(1e-6)


def standardized(
    values: Sequence[Tensor], total: Callable[[Sequence[Tensor], str], Tensor]
) -> list[Tensor]:
    """The values of each of this rank's parts, by mean and deviation of all ranks' parts.

    Args:
        values: one tensor for each part of this rank; parts may differ in length.
        total: the sum of one vector for each part, over all ranks; told what it is the sum for.
    """
    sums = total([_sum_and_count(value) for value in values], "a mean")
    count = int((sums[1:].cpu().long() * _POWERS).sum())
    mean = sums[:1] / count
    squares = [(value - mean).square().sum().reshape(1) for value in values]
    scale = (total(squares, "a variance") / max(1, count - 1)).sqrt().clamp_min(1e-6)
    return [(value - mean) / scale for value in values]


def _sum_and_count(value: Tensor) -> Tensor:
    """``[1 + 40]``: the sum, and the binary digits of how many numbers it is of.

    Digits of many parts add up without rounding, in half precision too.
    """
    total = value.sum().reshape(1)
    return torch.cat([total, (value.numel() // _POWERS % 2).to(total)])
