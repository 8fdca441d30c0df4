"""Policies for tests."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import MLP, ProbabilisticActor


def categorical(
    num_inputs: int = 4,
    num_actions: int = 3,
    seed: int = 0,
    num_cells: tuple[int, ...] = (16,),
) -> ProbabilisticActor:
    """A policy over indices, a small one by default."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = MLP(num_inputs, num_actions, num_cells=num_cells)
    return ProbabilisticActor(
        TensorDictModule(_Double(net), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


class _Double(nn.Module):
    """Takes observations of any float type."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: Tensor) -> Any:
        return self.net(torch.tanh(observation.float()))


class NeedsRows(nn.Module):
    """Fails on fewer rows than so many."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, observation: Tensor) -> Tensor:
        if len(observation) < self.least:
            raise ValueError("too few rows")
        return torch.ones(observation.shape[:-1], dtype=torch.int64)


def needs_rows(least: int) -> TensorDictModule:
    """A policy that fails on fewer rows than so many."""
    return TensorDictModule(NeedsRows(least), ["observation"], ["action"])


class Marked(nn.Module):
    """Writes the value of its one parameter beside a constant action."""

    def __init__(self, action: int = 1) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))
        self.action = action

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = observation.shape[:-1]
        action = torch.full(rows, self.action, dtype=torch.int64)
        return action, self.mark.expand(rows).clone(), self.count.expand(rows).clone()


def marked(action: int = 1) -> TensorDictModule:
    """A policy that tells with which parameters each action was taken."""
    return TensorDictModule(Marked(action), ["observation"], ["action", "mark", "count"])
