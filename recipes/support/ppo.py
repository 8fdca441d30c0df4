"""PPO's update, for an agent whose actor and critic share a trunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from support.learners import loss_of, minibatches
from support.pixel_options import PPOOptions
from support.pixels import Agent
from torchrl_hts import World

__all__ = ["PPO"]


class PPO:
    """TorchRL's ClipPPOLoss, GAE and Adam, for one round's batch at a time.

    Attributes:
        model: all that is trained.
        optimizer: Adam.
        schedule: of its learning rate, for `num_rounds` rounds.
    """

    def __init__(
        self, agent: Agent, options: PPOOptions, num_rounds: int, world: World | None = None
    ) -> None:
        self._world = world or World()
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
            normalize_advantage=False,  # but over a minibatch of all learners, by `minibatches`
        )
        self.model = nn.ModuleList([agent.trunk, self._loss_module])
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=options.learning_rate, eps=1e-5
        )
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1.0, 0.0, total_iters=num_rounds
        )

    def learn(self, batch: TensorDictBase) -> Iterator[tuple[list[TensorDictBase], Tensor]]:
        """Takes the optimizer's steps; yields the losses of each part, and the gradient's norm."""
        world, options = self._world, self._options
        parts = world.parts(batch)  # one, but with --shards
        for part in parts:
            self._agent.evaluate_next(part)
            self._advantage(part)  # of the values that the actors have computed
        steps = [part.exclude("next").reshape(-1) for part in parts]
        size, seed = options.minibatch_size, options.seed
        for epoch in range(options.epochs):
            for minibatch in minibatches(world, steps, size, seed=seed, epoch=epoch):
                losses = []
                for part in world.gradients(self.model, minibatch):
                    losses.append(self._loss_module(self._agent.trunk(part)))
                    loss_of(losses[-1]).backward()
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), options.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                yield losses, norm
