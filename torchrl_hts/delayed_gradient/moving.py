"""The update of a block, applied to the newest parameters (METHOD section 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["are_infinite", "move_newest", "put"]


def are_infinite(parameters: Iterable[Tensor]) -> list[bool]:
    """Whether each has an entry that isn't finite, as masks have."""
    return [not bool(parameter.isfinite().all()) for parameter in parameters]


def put(parameters: list[Tensor], values: list[Tensor]) -> None:
    """Give live parameters these values: autocast must not go on with what it has cast before."""
    torch._foreach_copy_(parameters, values)
    torch.clear_autocast_cache()


def move_newest(
    behaviour: Sequence[Tensor],
    block: Sequence[Tensor],
    newest: Sequence[Tensor],
    infinite: Sequence[bool],
) -> None:
    """theta_{j+lag+1} = (phi_j - theta_j) + theta_{j+lag}, in the place of theta_j.

    That place is free from now on. The live parameters are none, since some of them may be views of
    the same memory.

    Args:
        behaviour: theta_j, of each parameter; written to.
        block: phi_j, what the block has made of it.
        newest: theta_{j+lag}.
        infinite: of each parameter, whether it has entries that stay infinite: minus themselves
            they would be NaN.
    """
    for theta_j, phi_j, theta, is_mask in zip(behaviour, block, newest, infinite, strict=True):
        if phi_j.requires_grad and is_mask:
            moved = torch.where(phi_j == theta_j, theta, phi_j - theta_j + theta)
            theta_j.copy_(moved)
        elif phi_j.requires_grad:
            torch.sub(phi_j, theta_j, out=theta_j).add_(theta)
        else:
            _move_frozen(theta_j, phi_j, theta)


def _move_frozen(theta_j: Tensor, phi_j: Tensor, theta: Tensor) -> None:
    """The same of what no optimizer moves: masks that are infinite or bool stay what they are."""
    moved = phi_j - theta_j + theta if phi_j.is_floating_point() else phi_j
    moved = torch.where(theta == theta_j, phi_j, moved)
    theta_j.copy_(torch.where(phi_j == theta_j, theta, moved))
