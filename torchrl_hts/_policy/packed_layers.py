"""Large layers whose weights are put in a kernel's order once a round instead of in each pass.

A kernel wants its weights in an order of its own. Torch hands them over as they lie, so that each
pass first puts them in order. That takes as long as the products for the few rows of an actor's
batch. But a round has one set of parameters (I2), and oneDNN takes weights that it has put in order
before. It then also rounds alike, on the CPU where that was tried, for any 2 rows and more (I6).

The operators are what `torch.compile` calls for the same purpose, and not torch's public ones. Be
ready for any exception at the first call, and then run the layers as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

__all__ = ["PackedLayers"]

# Of a linear layer, 2 MiB: more than a core's own caches hold. With 8 rows packing has paid after 3
# to 17 passes; with one or two it never does. A convolution has few weights, and uses each often.
_LEAST_WEIGHTS = 1 << 19
_LEAST_ROWS = 8

# How far the outputs of two kernels may be apart, of the largest.
_TOLERANCE = 1e-3

_Order = Callable[[Tensor, Size], Tensor]
_Product = Callable[[Tensor, Tensor], Tensor]


class PackedLayers:
    """The layers inside a module that can be packed: plain ones, in float32, on the CPU.

    They are `nn.Conv2d` padded with a number of zeros, and, where there may be batches of at least
    8 rows, `nn.Linear` of at least 524,288 weights. They stay what they are, with their parameters
    and hooks, but their weights count as they are when `pack` is called. What a module with a
    forward pre-hook contains is left alone, since the hook may change them later. A convolution's
    output is channels last. The weights in order take their memory once more.

    Args:
        module: the module.
        rows: of its largest batch.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, kernel_size=3), nn.ReLU())
        >>> layers = PackedLayers(net, rows=2)
        >>> len(layers)
        1
        >>> layers.pack()
        >>> with torch.inference_mode():
        ...     net(torch.zeros(2, 3, 5, 5)).shape
        torch.Size([2, 8, 3, 3])
        >>> layers.unpack()
    """

    def __init__(self, module: nn.Module, rows: int) -> None:
        hooked = {
            layer
            for outer in module.modules()
            if outer._forward_pre_hooks
            for layer in outer.modules()
        }
        self._layers: list[_PackedLayer] = []
        for layer in module.modules():
            kernel = None if layer in hooked else _kernel(layer, rows)
            if kernel is not None:
                self._layers.append(_PackedLayer(layer, *kernel))

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def sources(self) -> list[Tensor]:
        """The layers' own weights."""
        return [layer.source for layer in self._layers]

    def pack(self) -> None:
        """Run the layers with their weights as they are now, put in order, from now on."""
        for layer in self._layers:
            layer.pack()

    def unpack(self) -> None:
        """Run the layers as they are again."""
        for layer in self._layers:
            layer.unpack()


class _PackedLayer:
    """What runs in the place of a layer's `forward`.

    Args:
        layer: the layer.
        order: puts its weights in order, for inputs of a shape.
        product: computes its output from an input and the weights in order.
    """

    def __init__(self, layer: Any, order: _Order, product: _Product) -> None:
        self.layer, self.order, self.product = layer, order, product
        self.source = layer.weight
        self.weight: Tensor | None = None
        self.shape: Size | None = None  # of the first input; the order doesn't change any more

    def pack(self) -> None:
        self.layer.__dict__["forward"] = self.forward
        if self.shape is not None:
            self.weight = self.order(self.source, self.shape)

    def unpack(self) -> None:
        self.layer.__dict__.pop("forward", None)
        self.weight = None

    def forward(self, input: Tensor) -> Tensor:
        if not self._serves(input):
            return self._plain(input)
        if self.weight is None:
            self.shape = input.shape
            self.weight = self.order(self.source, self.shape)
            self._check(input, self.weight)
        return self.product(input, self.weight)

    def _serves(self, input: Tensor) -> bool:
        """Whether an input is such as the kernel takes, and the weights are the layer's own."""
        if is_functorch_wrapped_tensor(input) or torch.is_autocast_enabled("cpu"):
            return False
        own = self.layer._parameters.get("weight") is self.source  # not in a functional call
        usual = input.dtype is torch.float32 and input.layout is torch.strided
        ndim = 4 if isinstance(self.layer, nn.Conv2d) else 2
        return own and usual and not input.is_nested and input.ndim == ndim and len(input) > 0

    def _plain(self, input: Tensor) -> Tensor:
        output: Tensor = type(self.layer).forward(self.layer, input)
        return output

    def _check(self, input: Tensor, weight: Tensor) -> None:
        """Raise RuntimeError unless the output is the layer's: the operators promise nothing."""
        expected, output = self._plain(input), self.product(input, weight)
        if not expected.isfinite().all():  # what is wrong then is told of by who reads the outputs
            return
        within = _TOLERANCE * expected.abs().amax().item()
        alike = output.dtype == expected.dtype
        if not alike or not torch.allclose(output, expected, rtol=0, atol=within):
            raise RuntimeError(f"{self.layer} computes something else with packed weights")


def _kernel(layer: nn.Module, rows: int) -> tuple[_Order, _Product] | None:
    """How a layer's weights are put in order and used; None where they aren't to be."""
    weight: Any = layer._parameters.get("weight")  # pruned or normalised layers have another
    if (
        type(weight) is not nn.Parameter
        or weight.device.type != "cpu"
        or weight.dtype is not torch.float32
        or "forward" in layer.__dict__
        or not torch._C._has_mkldnn
    ):
        return None
    if type(layer) is nn.Linear:
        pays = rows >= _LEAST_ROWS and weight.numel() >= _LEAST_WEIGHTS
        return _linear_kernel(layer) if pays else None
    if type(layer) is nn.Conv2d:
        zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return _convolution_kernel(layer) if zeros else None
    return None


def _linear_kernel(layer: nn.Linear) -> tuple[_Order, _Product]:
    def order(weight: Tensor, shape: Size) -> Tensor:
        ordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, shape[0])
        return ordered

    def product(input: Tensor, weight: Tensor) -> Tensor:
        rows, bias = input.contiguous(), layer.bias
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return output

    return order, product


def _convolution_kernel(layer: nn.Conv2d) -> tuple[_Order, _Product]:
    how = (layer.padding, layer.stride, layer.dilation, layer.groups)

    def order(weight: Tensor, shape: Size) -> Tensor:
        ordered: Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight, *how, shape)
        return ordered

    def product(input: Tensor, weight: Tensor) -> Tensor:
        rows, bias = input.contiguous(memory_format=torch.channels_last), layer.bias
        output: Tensor = torch.ops.mkldnn._convolution_pointwise(
            rows, weight, bias, *how, "none", [], ""
        )
        return output

    return order, product
