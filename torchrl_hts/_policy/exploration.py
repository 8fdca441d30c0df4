"""TorchRL's exploration modules, so that they draw each row's noise from its own words.

Axes: m rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchrl.data import BoundedContinuous, Categorical, OneHot
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import (
    AdditiveGaussianModule,
    EGreedyModule,
    OrnsteinUhlenbeckProcessModule,
)

from torchrl_hts._policy.draws import WordStream, draw_index, one_hot

__all__ = ["exploring"]

Forward = Callable[[TensorDictBase], TensorDictBase]


def exploring(module: nn.Module, noise: Callable[[], WordStream]) -> Forward | None:
    """What an exploration module does under ``ExplorationType.RANDOM``, with other noise.

    The distribution is that of its own ``forward``.

    Args:
        module: of a policy.
        noise: the words to draw from.

    Returns:
        In place of the module's ``forward``; None for other modules, and for actions of a kind that
        are drawn otherwise than element by element.
    """
    if type(module) is EGreedyModule:  # those below it may do otherwise
        return _epsilon_greedy(module, noise)
    if type(module) is AdditiveGaussianModule:
        return _gaussian(module, noise)
    if type(module) is OrnsteinUhlenbeckProcessModule:
        return _ornstein_uhlenbeck(module, noise)
    return None


def _epsilon_greedy(module: Any, noise: Callable[[], WordStream]) -> Forward | None:
    if module.spec is None:  # which it complains of itself
        return None
    key, spec = module.action_key, module.spec[module.action_key]
    draw = _drawing(spec)
    if draw is None:
        return None

    def explore(td: TensorDictBase) -> TensorDictBase:
        if not _explores():
            return td
        action, mask = td.get(key), None
        if spec.ndim and action.shape[-spec.ndim :] != spec.shape:
            raise ValueError(
                f"the actions {key!r} have shape {tuple(action.shape)}, and the spec of the "
                f"EGreedyModule has {tuple(spec.shape)}: they must end alike"
            )
        if module.action_mask_key is not None:
            mask = td[module.action_mask_key]
        holder = td if isinstance(key, str) or len(key) == 1 else td.get(key[:-1])
        words = noise()
        at_random = words.uniform(tuple(holder.shape)) < module.eps
        drawn = draw(action.shape, mask, words)
        return td.set(key, torch.where(expand_as_right(at_random, action), drawn, action))

    return explore


def _explores() -> bool:
    """Whether the policy itself has not chosen another exploration type for this call."""
    return exploration_type() in (ExplorationType.RANDOM, None)


def _drawing(spec: Any) -> Callable[[torch.Size, Tensor | None, WordStream], Tensor] | None:
    """How to draw from a spec, for actions of a shape, some of which may be masked."""
    if getattr(spec, "mask", None) is not None:
        return None
    if type(spec) in (Categorical, OneHot):
        count, hot = int(spec.space.n), type(spec) is OneHot

        def draw(shape: torch.Size, mask: Tensor | None, words: WordStream) -> Tensor:
            indices = shape[:-1] if hot else shape
            uniform = words.uniform(tuple(indices))
            if mask is None:
                index = (uniform * count).to(torch.int64)
            else:
                index = _allowed(mask, (*indices, count), uniform)
            return one_hot(index, count, spec.dtype) if hot else index.to(spec.dtype)

        return draw
    if type(spec) is not BoundedContinuous:
        return None
    low, high = spec.space.low, spec.space.high

    def draw_between(shape: torch.Size, mask: Tensor | None, words: WordStream) -> Tensor:
        share = words.uniform(tuple(shape))
        least, most = low.to(share.device), high.to(share.device)
        drawn = (least + share * (most - least)).to(spec.dtype)
        return torch.minimum(torch.maximum(drawn, least), most)

    return draw_between


def _allowed(mask: Tensor, shape: tuple[int, ...], uniform: Tensor) -> Tensor:
    """One of the indices that a mask allows, all of them alike."""
    if tuple(mask.shape) != shape:
        raise ValueError(f"expected a mask of actions of shape {shape}, got {tuple(mask.shape)}")
    if not bool(mask.any(-1).all()):
        raise ValueError("a mask of actions allows none of them")
    return draw_index(mask.to(torch.float64), uniform)


def _gaussian(module: Any, noise: Callable[[], WordStream]) -> Forward | None:
    if module.spec is None:
        return None
    key = module.action_key
    spec = module.spec[key]

    def add_noise(td: TensorDictBase) -> TensorDictBase:
        if not _explores():
            return td
        action = td.get(key)
        mean, std = map(_floating, (module.mean, module.std))
        moved = action + (mean + std * _normal(noise(), action.shape, std.dtype)) * module.sigma
        return td.set(key, spec.project(moved))

    return add_noise


def _ornstein_uhlenbeck(module: nn.Module, noise: Callable[[], WordStream]) -> Forward:
    forward: Forward = module.forward

    def add_noise(td: TensorDictBase) -> TensorDictBase:
        with _NormalsOf(noise()):  # the recursion stays TorchRL's
            return forward(td)

    return add_noise


class _NormalsOf(TorchFunctionMode):
    """Inside, `torch.randn_like` draws from words."""

    def __init__(self, words: WordStream) -> None:
        super().__init__()
        self.words = words

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn_like:
            (like,) = args
            return _normal(self.words, like.shape, like.dtype)
        return func(*args, **(kwargs or {}))


def _normal(words: WordStream, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    drawn: Tensor = torch.special.ndtri(words.uniform(tuple(shape))).to(dtype)
    return drawn


def _floating(value: Tensor) -> Tensor:
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())
