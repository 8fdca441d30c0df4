"""A short text that tells whether tensors have the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["digest"]


def digest(tensors: TensorDictBase | Iterable[Tensor]) -> str:
    """A short hash of the bits of a batch, keys included, or of some tensors.

    Args:
        tensors: of any shapes, data types and devices; in their order where they have no keys.

    Example:
        >>> digest([torch.zeros(2)]) == digest([torch.zeros(2)]), digest([-torch.zeros(2)])[:0]
        (True, '')
    """
    sha = hashlib.sha256()
    items: Iterable[tuple[Any, Tensor]] = (
        sorted(tensors.items(True, True), key=lambda item: str(item[0]))
        if isinstance(tensors, TensorDictBase)
        else enumerate(tensors)
    )
    for key, tensor in items:
        sha.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]
