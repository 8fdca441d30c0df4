"""Layers of tanh in numpy, which takes a sixth of the time that torch takes for them on the CPU.

The two round differently, so a policy gets them once, before anything of it is compared.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

__all__ = ["NumpyTanh", "tanh_in_numpy"]

_DTYPES = (torch.float32, torch.float64)


class NumpyTanh(nn.Tanh):
    """What an `nn.Tanh` computes, up to rounding; by torch where numpy can't.

    Example:
        >>> with torch.inference_mode():
        ...     NumpyTanh()(torch.tensor([0.0, 0.5]))
        tensor([0.0000, 0.4621])
    """

    def forward(self, input: Tensor) -> Tensor:
        """For an input of any shape."""
        if (
            input.device.type != "cpu"
            or input.dtype not in _DTYPES
            or input.layout is not torch.strided
            or input.is_nested
            or input.requires_grad
            or is_functorch_wrapped_tensor(input)
        ):
            return super().forward(input)
        return torch.from_numpy(np.asarray(np.tanh(input.numpy())))


def tanh_in_numpy(module: nn.Module) -> None:
    """Make every plain `nn.Tanh` inside a `NumpyTanh`. It stays the layer it is, with its hooks.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        >>> tanh_in_numpy(net)
        >>> net[1]
        NumpyTanh()
    """
    for layer in module.modules():
        if type(layer) is nn.Tanh:
            layer.__class__ = NumpyTanh
