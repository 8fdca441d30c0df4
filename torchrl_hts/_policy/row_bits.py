"""The bytes of rows, to compare: values compare otherwise than their bytes do.

NaN equals itself by its bytes, and 0.0 differs from -0.0.

Axes: m rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Bits", "row_bits", "row_marks"]

_LONG = 1_024  # bytes of a row in one tensor: hashing less takes longer than comparing it

Bits = npt.NDArray[np.uint8]


def row_bits(tensors: Sequence[Tensor]) -> Bits:
    """The bytes of some tensors ``[m, ...]``, side by side: uint8 ``[m, bytes of a row]``.

    Example:
        >>> row_bits([torch.tensor([1, -1], dtype=torch.int8), torch.tensor([[True], [False]])])
        array([[  1,   1],
               [255,   0]], dtype=uint8)
    """
    return np.concatenate([_bytes_of(tensor) for tensor in tensors], axis=1)


def row_marks(tensors: Sequence[Tensor]) -> Bits:
    """What tells rows apart as their bytes do, in a few bytes: uint8 ``[m, some]``.

    Of a tensor with long rows it is a hash of 64 bits for each row. That is enough: nobody chooses
    the bytes, and two rows that differ have the same hash once in 1.8e19 times. Two batch sizes
    that round differently do so in many rows. Marks compare within one process, which has a key of
    its own for hashes, and for tensors of the same shapes.

    Example:
        >>> rows = torch.zeros(3, 1000)
        >>> rows[2, 999] = -0.0
        >>> marks = row_marks([rows])
        >>> marks.shape, (marks[0] == marks[1]).all(), (marks[0] == marks[2]).all()
        ((3, 8), np.True_, np.False_)
    """
    return np.concatenate([_marks_of(tensor) for tensor in tensors], axis=1)


def _marks_of(tensor: Tensor) -> Bits:
    # Channels last, as the outputs of packed convolutions lie: then nothing has to be copied.
    rows = _bytes_of(tensor.movedim(1, -1) if tensor.ndim == 4 else tensor)
    if rows.shape[1] <= _LONG:
        return rows
    # Python's own hash of bytes: four times as fast as hashlib's.
    hashes = np.array([hash(row.tobytes()) for row in rows], np.int64)
    return hashes[:, None].view(np.uint8)


def _bytes_of(tensor: Tensor) -> Bits:
    """The bytes of one; over its memory where it lies in order."""
    flat = tensor.detach().cpu().reshape(len(tensor), tensor[:1].numel())
    if flat.stride(1) != 1:
        # Not contiguous(): that keeps the stride 0 of a single expanded row.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()
