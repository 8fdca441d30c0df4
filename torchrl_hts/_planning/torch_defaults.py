"""The defaults that torch has in workers, for a while in the user's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

__all__ = ["torchs_defaults"]


@contextmanager
def torchs_defaults() -> Iterator[None]:
    """Tensors are made as float32 on the CPU inside, whatever the user has set or is within.

    What is planned here is written by workers, in which nothing has been set: no autocast either.
    Nor are shared tensors those of an inference mode, outside of which nobody could write them.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            nullcontext() if device.type == "cpu" else torch.device("cpu"),
            torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
