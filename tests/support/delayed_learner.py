"""A user's loop with `DelayedGradient` in it, and how far apart two runs of it are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from delayed_gradient_reference import (
    Values,
    adam,
    make_batch,
    make_loss,
    minibatches,
    rmsprop,
    sgd,
    snapshot,
    total_loss,
)
from tensordict import TensorDict
from torch import nn

from torchrl_hts.delayed_gradient import DelayedGradient

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[[], Any]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.05), sgd),
    "sgd_momentum": (lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), lambda: sgd(0.9)),
    "sgd_decay": (lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1), lambda: sgd(0.0, 0.1)),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, 0.05), rmsprop),
    "adam": (lambda p: torch.optim.Adam(p, 0.05), adam),
    "adamw": (lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1), lambda: adam(0.1)),
}
PPO = {"epochs": 2, "num_minibatches": 3}


class Learner:
    """The user's loop, with `delayed` around each batch; without it, plain training."""

    def __init__(
        self,
        loss_name: str = "a2c",
        optimizer: str = "adam",
        *,
        lag: int | None = 1,
        gradient_at: Any = "behaviour",
        plain: bool = False,
        epochs: int = 1,
        num_minibatches: int = 1,
        max_norm: float | None = None,
        schedule: Callable[[int], float] = lambda j: 1.0,
        **loss_options: Any,
    ) -> None:
        self.dtype = loss_options.get("dtype", torch.float64)
        self.loss_module, self.advantage = make_loss(loss_name, **loss_options)
        self.optimizer = OPTIMIZERS[optimizer][0](self.loss_module.parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)
        self.parts = (epochs, num_minibatches)
        self.max_norm = max_norm
        self.delayed = DelayedGradient(self.loss_module, lag=lag, gradient_at=gradient_at)
        self.plain = plain

    def train_batch(self, batch: TensorDict) -> None:
        """The steps of the optimizer that a batch gives."""
        for minibatch in minibatches(batch, self.advantage, *self.parts):
            total_loss(self.loss_module, minibatch).backward()
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(self.loss_module.parameters(), self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.schedule.step()

    def run(self, start: int, stop: int) -> list[Values]:
        """Newest parameters after each of the rounds from `start` to before `stop`."""
        after = []
        for j in range(start, stop):
            batch = make_batch(j, self.dtype)
            if self.plain:
                self.train_batch(batch)
            else:
                with self.delayed(batch):
                    self.train_batch(batch)
            after.append(snapshot(self.loss_module))
        return after

    def state(self) -> dict[str, Any]:
        """All that a checkpoint holds."""
        parts = ("loss_module", "optimizer", "schedule", "delayed")
        return {part: getattr(self, part).state_dict() for part in parts}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        for part, value in state.items():
            getattr(self, part).load_state_dict(value)


def distance(left: list[Values], right: list[Values]) -> float:
    """The largest difference between any two parameters after the same round."""
    pairs = zip(left, right, strict=True)
    return max(float((a - b).abs().max()) for x, y in pairs for a, b in zip(x, y, strict=True))


def same_bits(left: list[Values], right: list[Values]) -> bool:
    """Whether all parameters are equal after every round."""
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))
