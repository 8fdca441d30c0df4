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
from torchrl.data import Bounded, Categorical, OneHot
from torchrl.modules import AdditiveGaussianModule, EGreedyModule

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
    forward = type(module).forward
    if forward is EGreedyModule.forward:
        return _epsilon_greedy(module, noise)
    if forward is AdditiveGaussianModule.forward:
        return _gaussian(module, noise)
    return None


def _epsilon_greedy(module: Any, noise: Callable[[], WordStream]) -> Forward | None:
    if module.spec is None:  # which it complains of itself
        return None
    key, spec = module.action_key, module.spec[module.action_key]
    draw = _drawing(spec)
    if draw is None:
        return None

    def explore(td: TensorDictBase) -> TensorDictBase:
        action = td.get(key)
        mask = None if module.action_mask_key is None else td.get(module.action_mask_key)
        holder = td if isinstance(key, str) or len(key) == 1 else td.get(key[:-1])
        words = noise()
        at_random = words.uniform(tuple(holder.shape)) < module.eps
        drawn = draw(action.shape, mask, words)
        return td.set(key, torch.where(expand_as_right(at_random, action), drawn, action))

    return explore


def _drawing(spec: Any) -> Callable[[torch.Size, Tensor | None, WordStream], Tensor] | None:
    """How to draw from a spec, for actions of a shape, some of which may be masked."""
    if getattr(spec, "mask", None) is not None:
        return None
    if type(spec) in (Categorical, OneHot):
        count, hot = int(spec.space.n), type(spec) is OneHot

        def draw(shape: torch.Size, mask: Tensor | None, words: WordStream) -> Tensor:
            uniform = words.uniform(tuple(shape[:-1] if hot else shape))
            if mask is None:
                index = (uniform * count).to(torch.int64)
            else:
                index = draw_index(mask.to(torch.float64), uniform)
            return one_hot(index, count, spec.dtype) if hot else index.to(spec.dtype)

        return draw
    if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
        return None
    low, high = spec.space.low, spec.space.high

    def draw_between(shape: torch.Size, mask: Tensor | None, words: WordStream) -> Tensor:
        share = words.uniform(tuple(shape))
        least, most = low.to(share.device), high.to(share.device)
        drawn = (least + share * (most - least)).to(spec.dtype)
        return torch.minimum(torch.maximum(drawn, least), most)

    return draw_between


def _gaussian(module: Any, noise: Callable[[], WordStream]) -> Forward | None:
    if module.spec is None:
        return None
    key = module.action_key
    spec = module.spec[key]

    def add_noise(td: TensorDictBase) -> TensorDictBase:
        action = td.get(key)
        uniform = noise().uniform(tuple(action.shape))
        standard = torch.special.ndtri(uniform).to(module.std.dtype)
        moved = action + (module.mean + module.std * standard) * module.sigma
        return td.set(key, spec.project(moved))

    return add_noise
