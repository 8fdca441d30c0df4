"""Multi-agent PPO on VMAS with HTSCollector and DelayedGradient: TorchRL's networks and loss.

A simulation holds many environments, which it steps as one in torch. Executors step several of
them and an actor runs the policy while this process learns. The agents of an environment share the
policy, and each sees its own observation alone; the critic, which they share too, sees those of
all. The settings are those of TorchRL's tutorial on multi-agent PPO.

    python recipes/mappo.py --scenario navigation

Ctrl-C saves a checkpoint and ends the run; --resume OUTPUT_DIR goes on with it. Needs the extra
'vmas'.
"""

from __future__ import annotations

from collections.abc import Callable

from support.errors import RecipeError, exit_with
from support.start import begin
from support.vmas_options import VmasOptions as Options

if __name__ == "__main__":  # before torch is imported, which takes seconds
    OPTIONS = begin(Options, __doc__)

import torch
from support.learners import learners, loss_of, minibatches
from support.run import Run
from support.vmas_batches import VIDEO_FPS, batches_of
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, HTSCollector

KEYS = {name: ("agents", name) for name in ("reward", "done", "terminated")}
KEYS["value"] = ("agents", "state_value")


def make_networks(env: VmasEnv, hidden_units: int) -> tuple[ProbabilisticActor, TensorDictModule]:
    """The policy of an agent, of its own observation, and the value, of those of all agents."""
    if env.het_specs:
        raise RecipeError(
            "this recipe trains one policy for agents that are all alike; observations or actions "
            f"of {', '.join(env.agent_names)} differ: take another --scenario"
        )
    space = env.full_action_spec_unbatched["agents", "action"].space
    sizes = {"n_agents": env.n_agents, "share_params": True, "depth": 2, "num_cells": hidden_units}
    sizes["n_agent_inputs"] = env.observation_spec["agents", "observation"].shape[-1]
    policy = MultiAgentMLP(n_agent_outputs=2 * space.low.shape[-1], centralized=False, **sizes)
    value = MultiAgentMLP(n_agent_outputs=1, centralized=True, **sizes)
    seen = [("agents", "observation")]
    outputs = [("agents", "loc"), ("agents", "scale")]
    actor = ProbabilisticActor(
        TensorDictModule(nn.Sequential(policy, NormalParamExtractor()), seen, outputs),
        in_keys=outputs,
        out_keys=[("agents", "action")],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": space.low, "high": space.high},
        return_log_prob=True,
    )
    return actor, TensorDictModule(value, seen, [KEYS["value"]])


def for_each_agent(batch: TensorDictBase) -> TensorDictBase:
    """Adds each agent's flags, for GAE, and the mean of their rewards, for the metrics."""
    reward = batch["next", "agents", "reward"]  # [N, T, agents, 1]
    for name in ("done", "terminated"):
        batch["next", "agents", name] = batch["next", name].unsqueeze(-1).expand(reward.shape)
    batch["next", "reward"] = reward.mean(-2)
    return batch


def make_loss(actor: ProbabilisticActor, critic: TensorDictModule, options: Options) -> ClipPPOLoss:
    """PPO's loss of a minibatch, of all agents together."""
    loss_module = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=options.clip_epsilon,
        entropy_coeff=options.entropy_coefficient,
        normalize_advantage=False,  # but over a minibatch, by `minibatches`
    )
    loss_module.set_keys(action=("agents", "action"), **KEYS)
    return loss_module


def to_play(options: Options) -> tuple[Callable[..., VmasEnv], ProbabilisticActor]:
    """How batches are made, and the policy, untrained: for play.py."""
    make_batch = batches_of(options)
    return make_batch, make_networks(make_batch(num_envs=1), options.hidden_units)[0]


def train(options: Options) -> int:
    """Trains a policy; returns the exit code."""
    seed, size = options.seed, options.minibatch_size
    torch.manual_seed(seed)
    torch.set_num_threads(options.torch_threads)
    make_batch = batches_of(options)
    actor, critic = make_networks(make_batch(num_envs=1), options.hidden_units)
    advantage = GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=critic)
    advantage.set_keys(**KEYS)
    loss_module = make_loss(actor, critic, options)
    frames_per_batch = options.num_envs * options.sync_interval
    num_rounds = -(-options.total_frames // frames_per_batch)
    parameters = list(loss_module.parameters())
    optimizer = torch.optim.Adam(parameters, lr=options.learning_rate)
    delayed = DelayedGradient(actor, lag=options.lag)
    parts = {"loss": loss_module, "optimizer": optimizer, "delayed": delayed}

    with (
        learners(options) as world,  # this one, or as many as torchrun has started
        HTSCollector(
            [make_batch] * options.num_batches,
            actor,
            frames_per_batch=frames_per_batch,
            total_frames=num_rounds * frames_per_batch,
            num_actors=options.num_actors,
            lag=options.lag,
            seed=seed,
            postproc=for_each_agent,
            world=world,
        ) as collector,
        Run("mappo", options, collector, make_batch, parts, video_fps=VIDEO_FPS) as run,
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
                        run.record(losses, norm, options.learning_rate)
            collector.update_policy_weights_()  # the next round that opens acts with these
    return run.exit_code


if __name__ == "__main__":
    exit_with(lambda: train(OPTIONS))
