"""The defaults that torch has in workers, for a while in the user's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["torchs_defaults"]


@contextmanager
def torchs_defaults() -> Iterator[None]:
    """Tensors are made as float32 on the CPU inside, whatever the user has set.

    What is planned here is written by workers, in which nothing has been set.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        if device.type == "cpu":
            yield
        else:
            with torch.device("cpu"):
                yield
    finally:
        torch.set_default_dtype(dtype)
