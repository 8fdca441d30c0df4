"""DQN over a replay buffer, for the benchmark: what learning off-policy costs."""

from __future__ import annotations

import torch
from support.pixels import Agent
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

__all__ = ["DQN"]

_STEPS_PER_UPDATE, _MINIBATCH = 4, 32  # as in the paper of DQN


class DQN:
    """Learns the logits of an agent as the values of its actions; it acts by drawing from them.

    Args:
        agent: what learns.

    Attributes:
        model: of the loss.
    """

    def __init__(self, agent: Agent) -> None:
        values = TensorDictModule(_Values(agent), ["observation"], ["action_value"])
        self.model = DQNLoss(
            QValueActor(values, action_space="categorical"),
            action_space="categorical",
            delay_value=True,
        )
        self.model.make_value_estimator(gamma=0.99)
        self._target = SoftUpdate(self.model, tau=0.005)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self._buffer = ReplayBuffer(storage=LazyTensorStorage(50_000), batch_size=_MINIBATCH)

    def learn(self, batch: TensorDictBase) -> None:
        """Keep a batch, and take an update for every four steps of it."""
        kept = batch.select("observation", "action", "next", "done", "terminated", strict=False)
        self._buffer.extend(kept.reshape(-1))
        for _ in range(max(1, batch.numel() // _STEPS_PER_UPDATE)):
            self.model(self._buffer.sample())["loss"].backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._target.step()


class _Values(nn.Module):
    """What an agent writes as logits."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.trunk, self.head = agent.trunk.module, agent.logits.module

    def forward(self, observation: Tensor) -> Tensor:
        values: Tensor = self.head(self.trunk(observation))
        return values
