"""Modules that do nothing but draw from a distribution, on arrays instead of tensors.

To make a distribution, to check its parameters and to compose its transforms takes torch up to ten
times what the numbers take. What is computed here is the same, up to rounding.

Axes: m rows of a batch, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
from torch import distributions as D
from torchrl.envs.utils import ExplorationType
from torchrl.modules import IndependentNormal, SafeProbabilisticModule, TanhNormal

from torchrl_hts._policy.draws import Uniforms, draw_categorical

__all__ = ["ArrayDraw", "are_fixed", "array_draw"]

Array = npt.NDArray[Any]
Drawn = tuple[Array, Array]  # a sample, and its log-probability

_LOG_SQRT_TAU = math.log(2 * math.pi) / 2
# What SafeTanhTransform keeps a value from reaching 1 by.
_FROM_ONE = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-15}
# Keyword arguments of the distributions, and the values that change nothing.
_NORMAL_KWARGS = {"tanh_loc": (False,), "event_dim": (1,)}
_TANH_KWARGS = {"tanh_loc": (False,), "event_dims": (None, 1), "safe_tanh": (True,)}
_UNUSED = {"upscale"}  # but for `tanh_loc`
_LOC_SCALE = ("loc", "scale")


class _Kind(NamedTuple):
    """How a kind of distribution is drawn from, given its parameters in order.

    Attributes:
        names: of the parameters.
        shape: of the uniforms, for the parameters.
        accepts: whether these parameters are such as `draw` takes; for others, the module is asked.
        draw: from the parameters and the uniforms.
    """

    names: tuple[str, ...]
    shape: Callable[[Sequence[Array]], tuple[int, ...]]
    accepts: Callable[[Sequence[Array]], bool]
    draw: Callable[[Sequence[Array], Uniforms], Drawn]


class ArrayDraw(NamedTuple):
    """How a module draws.

    Attributes:
        in_keys: of the distribution's parameters.
        out_keys: of the sample and, if the module returns it, of the log-probability.
        kind: of distribution.
    """

    in_keys: list[Any]
    out_keys: list[Any]
    kind: _Kind


def array_draw(module: Any, kind: ExplorationType) -> ArrayDraw | None:
    """How a module draws; None if it is of another kind, or does more than to draw.

    Taken are ``Categorical(logits=...)``, ``Normal``, ``IndependentNormal`` and ``TanhNormal``.

    Args:
        module: of a policy, as `steps.flatten` returns them.
        kind: the exploration type.
    """
    if (
        kind is not ExplorationType.RANDOM
        or isinstance(module, TensorDictModule)
        or any(_is_overridden(module, name) for name in ("get_dist", "_dist_sample"))
        or module.num_samples is not None
    ):
        return None
    found = _categorical(module) or _normal(module) or _tanh_normal(module)
    at = dict(zip(map(_last, module.dist_keys), module.in_keys, strict=True))
    if found is None or {*at} != {*found.names}:
        return None
    out_keys = [*module.dist_sample_keys]
    if module.return_log_prob:  # else there may be no such key
        out_keys.append(module.log_prob_key)
    return ArrayDraw([at[name] for name in found.names], out_keys, found)


def _categorical(module: Any) -> _Kind | None:
    if module.distribution_class is not D.Categorical or module.distribution_kwargs:
        return None
    return _Kind(
        ("logits",),
        lambda parameters: parameters[0].shape[:-1],
        lambda parameters: True,
        lambda parameters, u: draw_categorical(parameters[0], u),
    )


def _normal(module: Any) -> _Kind | None:
    kwargs = module.distribution_kwargs
    if module.distribution_class is D.Normal and not kwargs:
        return _Kind(_LOC_SCALE, _shape_of_loc, _are_normal, _draw_normal)
    if module.distribution_class is not IndependentNormal or _differ(kwargs, _NORMAL_KWARGS):
        return None
    return _Kind(_LOC_SCALE, _shape_of_loc, _are_normal, lambda of, u: _summed(_draw_normal(of, u)))


def _tanh_normal(module: Any) -> _Kind | None:
    if module.distribution_class is not TanhNormal or not are_fixed(module.distribution_kwargs):
        return None
    kwargs = dict(module.distribution_kwargs)
    bounds = kwargs.pop("low", -1), kwargs.pop("high", 1)
    if _differ(kwargs, _TANH_KWARGS):
        return None
    low, high = (torch.as_tensor(bound).cpu() for bound in bounds)
    # TorchRL's module scores what is drawn before it is squashed, tensordict's what comes of it.
    if module.return_log_prob and not isinstance(module, SafeProbabilisticModule):
        return None
    half, middle = ((high - low) / 2).numpy(), ((high + low) / 2).numpy()

    def accepts(parameters: Sequence[Array]) -> bool:
        loc = parameters[0]
        if half.ndim == 0:  # torch scores in the wider type
            fits = half.dtype in (np.float32, loc.dtype)
        else:
            fits = half.dtype == loc.dtype and half.shape == loc.shape[-half.ndim :]
        return fits and _are_normal(parameters)

    def draw(parameters: Sequence[Array], u: Uniforms) -> Drawn:
        return _summed(_squash(_draw_normal(parameters, u), half, middle))

    return _Kind(_LOC_SCALE, _shape_of_loc, accepts, draw)


def are_fixed(kwargs: Mapping[str, Any]) -> bool:
    """Whether a distribution's keyword arguments are no part of theta, as TensorDictParams are."""
    values = kwargs.values() if isinstance(kwargs, dict) else None
    return values is not None and not any(getattr(v, "requires_grad", False) for v in values)


def _shape_of_loc(parameters: Sequence[Array]) -> tuple[int, ...]:
    return parameters[0].shape


def _are_normal(parameters: Sequence[Array]) -> bool:
    """Whether they have one shape and type, which torch would otherwise bring together."""
    loc, scale = parameters
    return loc.shape == scale.shape and loc.dtype == scale.dtype and loc.ndim > 1


def _draw_normal(parameters: Sequence[Array], u: Uniforms) -> Drawn:
    """Values ``[..., A]`` of normal distributions, and the log-probability of each."""
    loc, scale = parameters
    value: Array = torch.special.ndtri(torch.from_numpy(u)).numpy().astype(loc.dtype)
    value *= scale
    value += loc
    score = (value - loc) / scale  # of the value as it was rounded, as torch computes it
    score *= score
    score *= -0.5
    score -= np.log(scale)
    score -= _LOG_SQRT_TAU
    return value, score


def _squash(drawn: Drawn, half: Array, middle: Array) -> Drawn:
    """The hyperbolic tangent of values, stretched to bounds."""
    value, score = drawn
    most = 1 - _FROM_ONE[value.dtype]
    squashed = np.tanh(value)
    np.minimum(squashed, most, out=squashed)
    np.maximum(squashed, -most, out=squashed)
    squashed *= half
    squashed += middle
    # The logarithm of the slope, 1 - tanh(x)**2, of which little is left for a large x.
    size = np.abs(value)
    slope = np.exp(-2 * size)
    slope += 1
    np.log(slope, out=slope)
    slope += size
    slope -= math.log(2)
    slope *= -2
    score -= slope
    score -= np.log(half)
    return squashed, score


def _summed(drawn: Drawn) -> Drawn:
    value, score = drawn
    total: Array = np.add.reduce(score, -1)
    return value, total


def _differ(given: Mapping[str, Any], plain: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether a keyword argument makes another distribution than `plain` values do."""
    return not all(
        name in _UNUSED or (name in plain and value in plain[name]) for name, value in given.items()
    )


def _last(key: str | tuple[str, ...]) -> str:
    """The name of a distribution's parameter, of the key it is read from."""
    return key if isinstance(key, str) else key[-1]


def _is_overridden(module: ProbabilisticTensorDictModule, name: str) -> bool:
    stock = getattr(ProbabilisticTensorDictModule, name)
    return name in vars(module) or getattr(type(module), name) is not stock
