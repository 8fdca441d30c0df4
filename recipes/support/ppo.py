"""PPO's update, for an agent whose actor and critic share a trunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from support.pixel_options import PPOOptions
from support.pixels import Agent

__all__ = ["PPO"]


class PPO:
    """TorchRL's ClipPPOLoss, GAE and Adam, for one round's batch at a time.

    Attributes:
        model: all that is trained.
        optimizer: Adam.
        schedule: of its learning rate, for `num_rounds` rounds.
    """

    def __init__(self, agent: Agent, options: PPOOptions, num_rounds: int) -> None:
        self._agent = agent
        self._options = options
        self._advantage = GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=None)
        self._loss_module = ClipPPOLoss(
            agent.actor_head,
            agent.critic_head,
            clip_epsilon=options.clip_epsilon,
            clip_value=options.clip_epsilon,
            entropy_coeff=options.entropy_coefficient,
            critic_coeff=options.critic_coefficient,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        self.model = nn.ModuleList([agent.trunk, self._loss_module])
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=options.learning_rate, eps=1e-5
        )
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1.0, 0.0, total_iters=num_rounds
        )

    def learn(self, batch: TensorDictBase) -> Iterator[tuple[TensorDictBase, Tensor]]:
        """Takes the optimizer's steps; yields the losses and the gradient's norm of each."""
        self._agent.evaluate_next(batch)
        self._advantage(batch)  # of the values that the actors have computed
        steps = batch.exclude("next").reshape(-1)
        for _ in range(self._options.epochs):
            for indices in torch.randperm(len(steps)).split(self._options.minibatch_size):
                losses = self._loss_module(self._agent.trunk(steps[indices]))
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                loss.backward()
                norm = nn.utils.clip_grad_norm_(
                    self.model.parameters(), self._options.max_grad_norm
                )
                self.optimizer.step()
                self.optimizer.zero_grad()
                yield losses, norm
