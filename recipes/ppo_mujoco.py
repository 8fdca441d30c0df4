"""PPO on continuous control with HTSCollector: gymnasium's MuJoCo tasks, and others like them.

Settings are those of CleanRL's ppo_continuous_action.py. Observations are normalised in the policy
by running statistics, part of the parameters that act; rewards are scaled in the learner.

    python recipes/ppo_mujoco.py --env-id HalfCheetah-v5

Ctrl-C saves and ends the run, --resume OUTPUT_DIR goes on with it, bit for bit.
"""

from __future__ import annotations

from functools import partial

from support.continuous import make_continuous
from support.continuous_options import ContinuousOptions as Options
from support.errors import exit_with
from support.start import begin

if __name__ == "__main__":  # before torch is imported, which takes seconds
    OPTIONS = begin(Options, __doc__)

import gymnasium as gym
import torch
from support.layers import orthogonal
from support.learners import learners, loss_of, minibatches
from support.run import Run
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, HTSCollector, RunningNorm, RunningRewardNorm


def make_networks(env: gym.Env, hidden: int) -> tuple[RunningNorm, TensorDictModule, ValueOperator]:
    """The statistics that both networks begin with, a policy, and a value function."""
    (inputs,), (actions,) = env.observation_space.shape, env.action_space.shape
    observations = RunningNorm(inputs)

    def mlp(outputs: int, output_gain: float) -> list[nn.Module]:
        layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
        for layer, gain in zip(layers, (2**0.5, 2**0.5, output_gain), strict=True):
            orthogonal(layer, gain)
        return [observations, layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]]

    net = nn.Sequential(*mlp(actions, 0.01), AddStateIndependentNormalScale(actions))
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Sequential(*mlp(1, 1.0)), in_keys=["observation"])
    return observations, actor, critic


def to_play(options: Options) -> tuple[partial[gym.Env], ProbabilisticActor]:
    """How environments are made, and the policy, untrained: for play.py."""
    make_env = partial(make_continuous, options.env_id)
    return make_env, make_networks(make_env(), options.hidden_units)[1]


def make_loss(actor: ProbabilisticActor, critic: ValueOperator, options: Options) -> ClipPPOLoss:
    """PPO's loss of a minibatch."""
    return ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=options.clip_epsilon,
        clip_value=options.clip_epsilon,
        entropy_coeff=options.entropy_coefficient,
        critic_coeff=0.25,  # the 0.5 of CleanRL is of half the squared error
        loss_critic_type="l2",
        normalize_advantage=False,  # but over a minibatch of all learners, by `minibatches`
    )


def train(options: Options) -> int:
    """Trains a policy; returns the exit code."""
    seed, size = options.seed, options.minibatch_size
    torch.manual_seed(seed)
    torch.set_num_threads(options.torch_threads)
    make_env = partial(make_continuous, options.env_id)
    observations, actor, critic = make_networks(make_env(), options.hidden_units)
    rewards = RunningRewardNorm(options.num_envs, gamma=options.gamma)
    advantage = GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=critic)
    loss_module = make_loss(actor, critic, options)
    frames_per_batch = options.num_envs * options.sync_interval
    num_rounds = -(-options.total_frames // frames_per_batch)
    parameters = list(loss_module.parameters())
    optimizer = torch.optim.Adam(parameters, lr=options.learning_rate, eps=1e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_rounds)
    delayed = DelayedGradient(actor, lag=options.lag)
    parts = {"loss": loss_module, "rewards": rewards, "optimizer": optimizer, "delayed": delayed}

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
        Run("ppo_mujoco", options, collector, make_env, {**parts, "schedule": schedule}) as run,
    ):
        for batch in run:  # the next round is already running
            rewards.normalize_(batch, world)
            with delayed(batch):  # policy and statistics are those that gathered this batch
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
            observations.update(batch, world)  # the newest statistics, no longer theta_j's
            collector.update_policy_weights_()  # the next round that opens acts with these
    return run.exit_code


if __name__ == "__main__":
    exit_with(lambda: train(OPTIONS))
