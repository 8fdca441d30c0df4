"""A small policy in numpy: dense layers, and a draw.

On the few rows of an actor's batch, torch takes two to four times as long as numpy to get to a
layer of some thousand weights. What it runs on the way drives everything else from the core's
caches. The arithmetic is the same; how it is rounded is not.

Axes: m rows of a batch, n values of a row, W uniforms of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType

from torchrl_hts._policy.array_draws import array_draw
from torchrl_hts._policy.draws import Uniforms, WordStream
from torchrl_hts._policy.numpy_layers import (
    FLOATS,
    NumpyMapping,
    NumpySoftplus,
    NumpyTanh,
    OneScale,
    are_numbers,
)
from torchrl_hts._policy.steps import exact_step, plain_layers
from torchrl_hts.delayed_gradient.running_norm import RunningNorm

__all__ = ["Array", "ArrayStep", "array_steps"]

Array = npt.NDArray[Any]
ArrayStep = Callable[[dict[Any, Any], Uniforms], None]
_Function = Callable[[Array], Array]

# Of a layer, rows times weights. Above, the product costs more than what surrounds it, and torch is
# faster; it may also use several threads (`actor_threads`).
_MOST_PRODUCTS = 1 << 18
# Rows of a product, where it is blocked. OpenBLAS's kernels for AVX2 round 4 and 8 rows alike, and
# the first 12 of 16 otherwise.
_BLOCK = 8


def array_steps(
    modules: Sequence[Any],
    kind: ExplorationType,
    rows: int,
    keep: Callable[[Array], None] | None = None,
    *,
    blocked: bool = False,
) -> list[ArrayStep] | None:
    """The steps of a policy, or None if it isn't such a one.

    A step is a function of a dict of arrays ``[m, n]``, to which it adds, and of the uniforms
    ``[m, W]`` of the one draw that there may be.

    All of it or nothing. The rows of a batch in which bits agree (I6) are fewer for a head of few
    outputs in numpy. A network of convolutions before it would pay for that.

    Args:
        modules: as `flatten` returns them. Their parameters are read where they lie now, and are
            to be changed in place.
        kind: the exploration type.
        rows: the largest m.
        keep: is called with what each layer passes on.
        blocked: whether linear layers multiply a multiple of 8 rows in blocks of 8.
    """
    if sum(not isinstance(module, TensorDictModule) for module in modules) > 1:
        return None
    steps = [
        _dense_step(module, rows, keep, blocked=blocked)
        if isinstance(module, TensorDictModule)
        else _drawing_step(module, kind)
        for module in modules
    ]
    return [step for step in steps if step is not None] if all(steps) else None


def _dense_step(
    module: TensorDictModule, rows: int, keep: Callable[[Array], None] | None, *, blocked: bool
) -> ArrayStep | None:
    """A linear layer and whatever follows it; at the end perhaps what makes a normal's parameters.

    What begins with a linear layer has, as torch sees to, an input of the weights' data type, which
    no layer overwrites. A `RunningNorm` may stand before it, which takes any.
    """
    if len(module.in_keys) != 1:
        return None
    (in_key,), out_keys = module.in_keys, module.out_keys_source
    layers = plain_layers(module.module) or []
    extract = _extractor(layers[-1]) if layers else None
    if extract is not None:
        layers = layers[:-1]
    found = [_function(layer, rows, blocked=blocked) for layer in layers]
    functions = [function for function in found if function is not None]
    begins = [type(layer) for layer in layers if type(layer) is not RunningNorm][:1]
    if len(functions) < len(layers) or begins != [nn.Linear]:
        return None
    if len(out_keys) != (1 if extract is None else 2):
        return None

    def compute(env: dict[Any, Any], uniforms: Uniforms) -> None:
        value = env[in_key]
        for function in functions:
            value = function(value)
            if keep is not None:
                keep(value)
        if extract is None:
            env[out_keys[0]] = value
            return
        for key, extracted in zip(out_keys, extract(value), strict=True):
            env[key] = extracted
            if keep is not None:
                keep(extracted)

    return compute


def _extractor(layer: nn.Module) -> Callable[[Array], tuple[Array, ...]] | None:
    """How a location and a scale come of a dense layer's output."""
    if type(layer) not in (NormalParamExtractor, AddStateIndependentNormalScale, OneScale):
        return None
    mapping: Any = getattr(layer, "scale_mapping", None)
    least: Any = layer.scale_lb
    is_plain = type(mapping) is NumpyMapping or (
        type(mapping) is NumpySoftplus and plain_layers(mapping) is not None
    )
    if is_plain and are_numbers(least):

        def extract(value: Array) -> tuple[Array, Array]:
            half = (value.shape[1] + 1) // 2  # as torch.chunk cuts
            return value[:, :half], np.maximum(mapping.of(value[:, half:]), least)

        return extract
    forward = layer.forward  # of torch, in the same memory
    return lambda value: tuple(each.numpy() for each in forward(torch.from_numpy(value)))


def _function(layer: nn.Module, rows: int, *, blocked: bool) -> _Function | None:
    """What a layer computes, of an array ``[m, in]``; never in place."""
    if type(layer) is nn.Linear:
        return _linear(layer, rows, blocked=blocked)
    if type(layer) in (nn.Tanh, NumpyTanh):
        return np.tanh
    if type(layer) is RunningNorm:
        return _norm(layer)
    return _relu if type(layer) is nn.ReLU else None


def _linear(layer: nn.Linear, rows: int, *, blocked: bool) -> _Function | None:
    weight: Any = layer._parameters.get("weight")
    bias: Any = layer._parameters.get("bias")
    if (
        weight is None
        or weight.device.type != "cpu"
        or weight.dtype not in FLOATS
        or rows * weight.numel() > _MOST_PRODUCTS
    ):
        return None
    matrix = weight.detach().numpy().T
    product = _in_blocks if blocked else np.dot
    if bias is None:
        return (lambda x: product(x, matrix)) if layer.bias is None else None
    offset = bias.detach().numpy()

    def linear(x: Array) -> Array:
        y: Array = product(x, matrix)
        y += offset
        return y

    return linear


def _in_blocks(x: Array, matrix: Array) -> Array:
    """The product, each block of rows for itself where they come out even."""
    m = len(x)
    if m <= _BLOCK or m % _BLOCK:
        few: Array = x.dot(matrix)
        return few
    blocks: Array = np.matmul(x.reshape(-1, _BLOCK, x.shape[1]), matrix)
    return blocks.reshape(m, -1)


def _norm(layer: RunningNorm) -> _Function | None:
    """What the layer computes, in float64 as there."""
    if layer.mean.device.type != "cpu" or layer.mean.ndim != 1 or layer.dtype not in FLOATS:
        return None
    eps, clip, buffers = layer.eps, layer.clip, cast(dict[str, torch.Tensor], layer._buffers)
    dtype = torch.empty(0, dtype=layer.dtype).numpy().dtype

    def normalize(x: Array) -> Array:
        mean, var = (buffers[name].numpy() for name in ("mean", "var"))
        y: Array = np.subtract(x, mean, dtype=np.float64)
        y /= np.sqrt(var + eps)
        np.minimum(y, clip, out=y)
        np.maximum(y, -clip, out=y)
        return y.astype(dtype)

    return normalize


def _relu(x: Array) -> Array:
    y: Array = np.maximum(x, 0)
    return y


def _drawing_step(module: Any, kind: ExplorationType) -> ArrayStep | None:
    found = array_draw(module, kind)
    if found is None:
        return None
    general = exact_step(module, kind)

    def draw(env: dict[Any, Any], uniforms: Uniforms) -> None:
        arrays = [env[key] for key in found.in_keys]
        if found.kind.accepts(arrays):
            drawn = found.kind.draw(arrays, uniforms.reshape(found.kind.shape(arrays)))
            env.update(zip(found.out_keys, drawn, strict=False))
            return
        tensors = {key: torch.from_numpy(env[key]) for key in found.in_keys}
        general(tensors, WordStream(len(uniforms), uniforms, torch.device("cpu")))
        env.update({key: tensors[key].numpy() for key in found.out_keys})

    return draw
