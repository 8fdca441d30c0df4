"""A policy that is told in which round to fail, and how."""

from __future__ import annotations

import os

import torch
from tensordict.nn import TensorDictModule
from told import first_time, strike
from torch import Tensor, nn
from torchrl.modules import MLP, ProbabilisticActor

CALIBRATION = -1


class Told(nn.Module):
    """Fails in one round, once, in an actor.

    Args:
        fault: what happens (see `told.strike`); ``"nan"`` spoils the output instead.
        at: the value of `updates` in the round; `CALIBRATION` before the first.
        marker: a file that is made when it happens.
    """

    def __init__(self, fault: str, at: int, marker: str) -> None:
        super().__init__()
        self.fault, self.at, self.marker = fault, at, marker
        self.main_pid = os.getpid()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = MLP(4, 3, num_cells=[16])
        self.register_buffer("updates", torch.zeros(()))

    def forward(self, observation: Tensor) -> Tensor:
        logits: Tensor = self.net(torch.tanh(observation.float()))
        # An environment's seed is large; the observations of the calibration are standard normal.
        calibrates = bool(observation[:, 0].abs().max() < 100)
        at = CALIBRATION if calibrates else int(self.updates)
        if at == self.at and os.getpid() != self.main_pid and first_time(self.marker):
            strike(self.fault)
            if self.fault == "nan":
                return logits * torch.nan
        return logits


def told_policy(fault: str = "none", at: int = 0, marker: str = "") -> ProbabilisticActor:
    """A small policy over indices."""
    return ProbabilisticActor(
        TensorDictModule(Told(fault, at, marker), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def learn(policy: nn.Module) -> None:
    """An update that depends on nothing but how many there were."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.97)
        for name, buffer in policy.named_buffers():
            if name.endswith("updates"):
                buffer += 1
