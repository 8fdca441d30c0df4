"""PPO on CartPole-v1 with HTSCollector and DelayedGradient: TorchRL's own loss, unchanged.

Executors step the environments and an actor runs the policy while this process learns. Each round
is gathered by parameters that are one update old. DelayedGradient takes the policy's gradients of a
round at the parameters that gathered it, so that PPO starts each update exactly on-policy. The
critic has a network of its own, and is trained without delay (recipes/README.md says why).

    python recipes/ppo_cartpole.py --require-return 475

Ctrl-C saves a checkpoint and ends the run; --resume OUTPUT_DIR goes on with it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from support.errors import exit_with
from support.required_return import check_return
from support.start import begin
from support.vector_options import CartPoleOptions as Options

if __name__ == "__main__":  # before torch is imported, which takes seconds
    OPTIONS = begin(Options, __doc__)

import gymnasium as gym
import torch
from support.layers import orthogonal
from support.learners import learners, loss_of, minibatches
from support.run import Run
from support.vectors import check_spaces
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, HTSCollector


def make_networks(env: gym.Env, hidden: int) -> tuple[ProbabilisticActor, ValueOperator]:
    """A policy and a value function with a trunk each, orthogonally initialised."""
    check_spaces(env)
    inputs, actions = env.observation_space.shape[0], int(env.action_space.n)

    def mlp(outputs: int, output_gain: float) -> nn.Sequential:
        layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
        for layer, gain in zip(layers, (2**0.5, 2**0.5, output_gain), strict=True):
            orthogonal(layer, gain)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    actor = ProbabilisticActor(
        TensorDictModule(mlp(actions, 0.01), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return actor, ValueOperator(mlp(1, 1.0), in_keys=["observation"])


def to_play(options: Options) -> tuple[Callable[..., gym.Env], ProbabilisticActor]:
    """How environments of evaluations are made, and the policy, untrained: for play.py."""
    make_env = partial(gym.make, options.env_id)
    return make_env, make_networks(make_env(), options.hidden_units)[0]


def make_loss(actor: ProbabilisticActor, critic: ValueOperator, options: Options) -> ClipPPOLoss:
    """PPO's loss of a minibatch."""
    return ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=options.clip_epsilon,
        entropy_coeff=options.entropy_coefficient,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=False,  # but over a minibatch of all learners, by `minibatches`
    )


def train(options: Options) -> int:
    """Trains a policy; returns the exit code."""
    seed, size = options.seed, options.minibatch_size
    torch.manual_seed(seed)
    torch.set_num_threads(options.torch_threads)
    make_env = partial(gym.make, options.env_id)
    actor, critic = make_networks(make_env(), options.hidden_units)
    advantage = GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=critic)
    loss_module = make_loss(actor, critic, options)
    frames_per_batch = options.num_envs * options.sync_interval
    num_rounds = -(-options.total_frames // frames_per_batch)
    parameters = list(loss_module.parameters())
    optimizer = torch.optim.Adam(parameters, lr=options.learning_rate, eps=1e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_rounds)
    delayed = DelayedGradient(actor, lag=options.lag)
    parts = {"loss": loss_module, "optimizer": optimizer, "schedule": schedule, "delayed": delayed}

    with (
        learners(options) as world,  # this one, or as many as torchrun has started
        HTSCollector(
            [make_env] * options.num_envs,
            actor,
            frames_per_batch=frames_per_batch,
            total_frames=num_rounds * frames_per_batch,
            num_actors=options.num_actors,
            lag=options.lag,
            seed=seed,
            world=world,
        ) as collector,
        Run("ppo_cartpole", options, collector, make_env, parts) as run,
    ):
        for batch in run:  # the next round is already running
            with delayed(batch):  # the policy is the one that gathered this batch
                shards = world.parts(batch)  # one, but with --shards
                for shard in shards:
                    with torch.no_grad():
                        advantage(shard)
                for epoch in range(options.epochs):
                    for minibatch in minibatches(world, shards, size, seed=seed, epoch=epoch):
                        losses = []
                        for part in world.gradients(loss_module, minibatch):
                            losses.append(loss_module(part))
                            loss_of(losses[-1]).backward()
                        norm = nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
                        optimizer.step()
                        optimizer.zero_grad()
                        run.record(losses, norm, schedule.get_last_lr()[0])
            schedule.step()
            collector.update_policy_weights_()  # the next round that opens acts with these
    check_return(run, world)
    return run.exit_code


if __name__ == "__main__":
    exit_with(lambda: train(OPTIONS))
