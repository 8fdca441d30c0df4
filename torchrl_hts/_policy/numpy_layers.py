"""Layers that numpy computes in less time, or with steadier bits, than torch: tanh, and scales.

Torch takes six times as long for tanh. And how it rounds an exponential depends on where a value
lies in a tensor, so few batch sizes would agree (I6). The two round differently, so a policy gets
these layers once, before anything of it is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    biased_softplus,
    mappings,
)
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

__all__ = [
    "FLOATS",
    "NumpyMapping",
    "NumpySoftplus",
    "NumpyTanh",
    "OneScale",
    "are_numbers",
    "layers_in_numpy",
]

Array = npt.NDArray[Any]

FLOATS = (torch.float32, torch.float64)  # that arrays have as well


class NumpyTanh(nn.Tanh):
    """What an `nn.Tanh` computes, up to rounding; by torch where numpy can't.

    Example:
        >>> with torch.inference_mode():
        ...     NumpyTanh()(torch.tensor([0.0, 0.5]))
        tensor([0.0000, 0.4621])
    """

    def forward(self, input: Tensor) -> Tensor:
        """For an input of any shape."""
        return _computed(input, np.tanh, super().forward)

    def overwrite(self, input: Tensor) -> Tensor:
        """The same in the memory of the input, which nobody else reads."""
        if not _is_plain(input):
            return super().forward(input)
        values = input.numpy()
        np.tanh(values, out=values)
        return input


def _is_plain(tensor: Tensor) -> bool:
    """Whether its numbers, and nothing else, lie in the CPU's memory."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.dtype in FLOATS
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and not is_functorch_wrapped_tensor(tensor)
        and not tensor.is_neg()
        and forward_ad._current_level < 0
    )


def _computed(
    input: Tensor, of: Callable[[Array], Array], by_torch: Callable[[Tensor], Tensor]
) -> Tensor:
    """What `of` makes of an input in the CPU's memory, and torch of any other."""
    if not _is_plain(input):
        return by_torch(input)
    return torch.from_numpy(np.asarray(of(input.numpy())))


class NumpySoftplus(biased_softplus):  # type: ignore[misc]
    """What a `biased_softplus` computes, up to rounding; by torch where numpy can't."""

    def of(self, x: Array) -> Array:
        """For an array of any shape."""
        y: Array = _softplus(x + self.bias) + self.min_val
        return y

    def forward(self, x: Tensor) -> Tensor:
        """For an input of any shape."""
        return _computed(x, self.of, super().forward)


class NumpyMapping:
    """A function of numbers, up to rounding; by torch where numpy can't.

    Args:
        mapping: of tensors.
        of: the same of arrays.

    Example:
        >>> with torch.inference_mode():
        ...     NumpyMapping(torch.exp, np.exp)(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 2.7183])
    """

    def __init__(self, mapping: Callable[[Tensor], Tensor], of: Callable[[Array], Array]) -> None:
        self.mapping, self.of = mapping, of

    def __call__(self, input: Tensor) -> Tensor:
        """For an input of any shape."""
        return _computed(input, self.of, self.mapping)


class OneScale(AddStateIndependentNormalScale):  # type: ignore[misc]
    """Maps its scale once, where an `AddStateIndependentNormalScale` does for every row.

    Rows share a few values, whose bits often agree by chance however torch rounds. So calibration
    wouldn't see in which batch sizes they do for all values that are yet to be learned.
    """

    def forward(self, loc: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """For a location ``[..., *scale_shape]``."""
        shape = self.scale_shape
        if not shape or shape != loc.shape[-len(shape) :]:
            refused: tuple[Tensor, ...] = super().forward(loc, *others)
            return refused
        mapped = mappings(self.scale_mapping)(self.state_independent_scale)
        return loc, mapped.clamp_min(self.scale_lb).expand_as(loc).contiguous(), *others


def _softplus(x: Array) -> Array:
    y: Array = np.log1p(np.exp(-np.abs(x)))
    return y + np.maximum(x, 0)


def are_numbers(*values: Any) -> bool:
    """Whether these are numbers of Python, which leave an array's data type as it is."""
    return all(type(value) in (int, float) for value in values)


def layers_in_numpy(module: nn.Module) -> None:
    """Make every plain `nn.Tanh` inside a `NumpyTanh`. It stays the layer it is, with its hooks.

    The same of what a `NormalParamExtractor` makes scales with: softplus, biased or not, and exp.
    An `AddStateIndependentNormalScale` of such a mapping becomes a `OneScale`.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        >>> layers_in_numpy(net)
        >>> net[1]
        NumpyTanh()
    """
    for layer in module.modules():
        if type(layer) is nn.Tanh:
            layer.__class__ = NumpyTanh
        elif type(layer) is biased_softplus and are_numbers(layer.bias, layer.min_val):
            layer.__class__ = NumpySoftplus
        elif type(layer) is AddStateIndependentNormalScale:
            name: Any = layer.scale_mapping
            if name in ("exp", "softplus") or name.startswith("biased_softplus"):
                layer.__class__ = OneScale
        elif type(layer) is NormalParamExtractor:
            mapping: Any = layer.scale_mapping
            for function, of in ((torch.exp, np.exp), (nn.functional.softplus, _softplus)):
                if mapping is function:
                    vars(layer)["scale_mapping"] = NumpyMapping(mapping, of)
