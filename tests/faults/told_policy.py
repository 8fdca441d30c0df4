"""A policy that is told in which round to fail, and how."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from told import first_time, strike
from torch import Tensor, nn
from torchrl.modules import MLP, ProbabilisticActor

CALIBRATION = -1
START_UP = -2  # when an actor is handed the policy


class Told(nn.Module):
    """Fails in one round, once, in an actor.

    Args:
        fault: what happens (see `told.strike`); ``"nan"`` spoils the output instead.
        at: the value of `updates` in the round; `CALIBRATION` or `START_UP` before the first.
        marker: a file that is made when it happens; of a batch, it gets the observations.
        batch: the batch of an actor in that round, counted from 0.
    """

    def __init__(self, fault: str, at: int, marker: str, batch: int) -> None:
        super().__init__()
        self.fault, self.at, self.marker, self.batch = fault, at, marker, batch
        self.batches: Counter[int] = Counter()  # that this actor has computed
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
        self.batches[at] += 1
        fails = self.batches[at] > self.batch and self._meets(at, observation)
        if fails and self.fault == "nan":
            return logits * torch.nan
        return logits

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._meets(START_UP)

    def _meets(self, at: int, observation: Tensor | None = None) -> bool:
        """At the moment that it was told of: fail, or return True."""
        if at != self.at or os.getpid() == self.main_pid or not first_time(self.marker):
            return False
        if observation is not None:
            Path(self.marker).write_text(json.dumps(observation.tolist()))
        strike(self.fault)
        return True


def told_policy(
    fault: str = "none", at: int = 0, marker: str = "", batch: int = 0
) -> ProbabilisticActor:
    """A small policy over indices."""
    return ProbabilisticActor(
        TensorDictModule(Told(fault, at, marker, batch), ["observation"], ["logits"]),
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
