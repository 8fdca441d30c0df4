"""The learners of recipes/ppo_mujoco.py and recipes/mappo.py, for batches of any collector."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import _recipes  # noqa: F401  so that the recipes are found
import mappo
import ppo_mujoco
import torch
from support.continuous import make_continuous
from support.learners import loss_of, minibatches
from tensordict import TensorDictBase
from torch import nn
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, RunningNorm, RunningRewardNorm, World

__all__ = ["Learner", "control_learner", "team_learner"]


@dataclass
class Learner:
    """Learns from batches ``[N, T]``, as a recipe's loop does.

    Attributes:
        policy: that acts.
        prepare: called with each batch before it is learned from.
        finish: called with it when the newest parameters are there.
        lag: of the collector; None for one whose batches are of the newest parameters.
    """

    policy: nn.Module
    loss_module: nn.Module
    advantage: Callable[[TensorDictBase], Any]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LinearLR | None
    world: World
    epochs: int
    minibatch_size: int
    max_grad_norm: float
    prepare: Callable[[TensorDictBase], Any]
    finish: Callable[[TensorDictBase], Any]
    lag: int | None
    seed: int = 0

    def __post_init__(self) -> None:
        """Make what is kept from batch to batch."""
        self._delayed = None if self.lag is None else DelayedGradient(self.policy, lag=self.lag)
        self._parameters = list(self.loss_module.parameters())

    def learn(self, batch: TensorDictBase) -> None:
        """One update."""
        self.prepare(batch)
        with nullcontext() if self._delayed is None else self._delayed(batch):
            (part,) = self.world.parts(batch)
            with torch.no_grad():
                self.advantage(part)
            for epoch in range(self.epochs):
                self._pass_over(part, epoch)
        if self.schedule is not None:
            self.schedule.step()
        self.finish(batch)

    def _pass_over(self, part: TensorDictBase, epoch: int) -> None:
        size, seed = self.minibatch_size, self.seed
        for minibatch in minibatches(self.world, [part], size, seed=seed, epoch=epoch):
            for rows in self.world.gradients(self.loss_module, minibatch):
                loss_of(self.loss_module(rows)).backward()
            nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()


def control_learner(
    env_id: str,
    world: World,
    *,
    lag: int | None,
    normalises_observations: bool = True,
    normalises_rewards: bool = True,
    rounds: int | None = None,
    num_envs: int = 8,
    seed: int = 0,
) -> Learner:
    """That of recipes/ppo_mujoco.py.

    Args:
        env_id: the task.
        world: this process alone.
        lag: see `Learner`.
        normalises_observations: whether the networks do, as in the recipe; or what they are given
            is normalised already.
        normalises_rewards: whether the learner does, as in the recipe.
        rounds: after which the learning rate is 0; None keeps it.
        num_envs: rows of a batch.
        seed: of the order of steps.
    """
    options = ppo_mujoco.Options(env_id=env_id)
    env = make_continuous(env_id)
    observations, actor, critic = ppo_mujoco.make_networks(env, options.hidden_units)
    env.close()
    if not normalises_observations:
        for network in (actor, critic):
            _take_out(observations, network)
    loss_module = ppo_mujoco.make_loss(actor, critic, options)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=options.learning_rate, eps=1e-5)
    schedule = None
    if rounds is not None:
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=rounds)
    rewards = RunningRewardNorm(num_envs, gamma=options.gamma)
    return Learner(
        actor,
        loss_module,
        GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=critic),
        optimizer,
        schedule,
        world,
        options.epochs,
        options.minibatch_size,
        options.max_grad_norm,
        prepare=partial(rewards.normalize_, world=world) if normalises_rewards else _nothing,
        finish=partial(observations.update, world=world) if normalises_observations else _nothing,
        lag=lag,
        seed=seed,
    )


def team_learner(options: mappo.Options, world: World, *, lag: int | None) -> Learner:
    """That of recipes/mappo.py.

    Args:
        options: of the recipe.
        world: this process alone.
        lag: see `Learner`.
    """
    env = mappo.batches_of(options)(num_envs=1)
    actor, critic = mappo.make_networks(env, options.hidden_units)
    env.close()
    loss_module = mappo.make_loss(actor, critic, options)
    advantage = GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=critic)
    advantage.set_keys(**mappo.KEYS)
    return Learner(
        actor,
        loss_module,
        advantage,
        torch.optim.Adam(loss_module.parameters(), lr=options.learning_rate),
        None,
        world,
        options.epochs,
        options.minibatch_size,
        options.max_grad_norm,
        prepare=mappo.for_each_agent,
        finish=_nothing,
        lag=lag,
        seed=options.seed,
    )


def _take_out(norm: RunningNorm, network: nn.Module) -> None:
    """Let a network begin with its first layer."""
    for part in network.modules():
        if isinstance(part, nn.Sequential) and part[0] is norm:
            part[0] = nn.Identity()


def _nothing(batch: TensorDictBase) -> None:
    pass
