"""Values with mean 0 and deviation 1, of one part or of all parts together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

__all__ = ["standardized", "standardized_alone"]


def standardized_alone(value: Tensor) -> Tensor:
    """By the very terms that TorchRL's losses use; a single number stays as it is."""
    if value.numel() <= 1:
        return value
    return (value - value.mean()) / value.std().clamp_min(1e-6)


def standardized(
    values: Sequence[Tensor], count: int, total: Callable[[Sequence[Tensor], str], Tensor]
) -> list[Tensor]:
    """The values of each of this rank's parts, by mean and deviation of all ranks' parts.

    Args:
        values: one tensor for each part of this rank.
        count: numbers in all parts of all ranks.
        total: the sum of one vector for each part, over all ranks; told what it is the sum for.
    """
    mean = total([value.sum().reshape(1) for value in values], "a mean") / count
    squares = [(value - mean).square().sum().reshape(1) for value in values]
    scale = (total(squares, "a variance") / max(1, count - 1)).sqrt().clamp_min(1e-6)
    return [(value - mean) / scale for value in values]
