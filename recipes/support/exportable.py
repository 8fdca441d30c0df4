"""Modules of TorchRL's that torch.export can't follow, in forms that it can."""

from __future__ import annotations

from copy import deepcopy

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule, MultiAgentMLP

__all__ = ["exportable"]


def exportable(module: nn.Module) -> nn.Module:
    """A copy that computes the same, of single steps, without what depends on values or on vmap."""
    module = deepcopy(module)
    for name, part in [*module.named_modules()]:
        other = _other_form(part)
        if other is not None:
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, other)
    return module


def _other_form(part: nn.Module) -> nn.Module | None:
    """Of one module; None where it can stay."""
    if isinstance(part, GRUModule | LSTMModule):
        network = part.gru if isinstance(part, GRUModule) else part.lstm
        return TensorDictModule(_Step(network), list(part.in_keys), list(part.out_keys))
    if isinstance(part, MultiAgentMLP) and part.share_params and not part.centralized:
        part.params.to_module(part._empty_net)
        return part._empty_net
    return None


class _Step(nn.Module):
    """A step of a recurrent network; asks of no value whether an episode begins."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, value: Tensor, *read: Tensor) -> tuple[Tensor, ...]:
        """Of ``[B, inputs]`` and states ``[B, layers, width]``; is_init is read last."""
        *states, is_init = read
        before = [
            torch.where(is_init[..., None], 0, state).transpose(0, 1).contiguous()
            for state in states
        ]
        gru = len(before) == 1
        seen, after = self.network(value.unsqueeze(1), before[0] if gru else tuple(before))
        after = (after,) if gru else after
        return seen.squeeze(1), *(state.transpose(0, 1) for state in after)
