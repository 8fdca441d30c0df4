"""PPO with a memory: TorchRL's GRUModule on CartPole-v1 whose velocities are not seen.

Actors run it step by step, and the collector carries its state, over rounds as well. The learner
runs it over whole rows of a batch, from what each began with, and anew where an episode begins.

    python recipes/ppo_recurrent.py [--no-memory]

Ctrl-C saves a checkpoint and ends the run; --resume OUTPUT_DIR goes on with it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from support.errors import exit_with
from support.start import begin
from support.vector_options import RecurrentOptions as Options

if __name__ == "__main__":  # before torch is imported, which takes seconds
    OPTIONS = begin(Options, __doc__)

import gymnasium as gym
import torch
from support.learners import learners, loss_of, minibatches
from support.run import Run
from support.vectors import make_partly_hidden
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import GRUModule, ProbabilisticActor, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, HTSCollector


def to_play(options: Options) -> tuple[Callable[..., gym.Env], TensorDictSequential]:
    """How environments are made; and actor and critic, each with a memory of its own."""
    make_env = partial(make_partly_hidden, options.env_id, options.hide)
    env, width = make_env(), options.hidden_units

    def layer(inputs: int, reads: str, writes: str) -> TensorDictModule:
        module = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
        return TensorDictModule(module, [reads], [writes])

    def network(name: str, outputs: int, writes: str) -> TensorDictSequential:
        seen, state, features = f"{name}_seen", f"{name}_state", f"{name}_features"
        gru = GRUModule(width, width, in_keys=[seen, state], out_keys=[features, ("next", state)])
        return TensorDictSequential(
            layer(env.observation_space.shape[0], "observation", seen),
            gru if options.memory else layer(width, seen, features),
            TensorDictModule(nn.Linear(width, outputs), [features], [writes]),
        )

    actor = ProbabilisticActor(
        network("actor", int(env.action_space.n), "logits"),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return make_env, TensorDictSequential(actor, network("critic", 1, "state_value"))


@torch.no_grad()
def evaluate(critic: nn.Module, batch: TensorDictBase) -> None:
    """Writes the values of all steps, over whole rows, and of what follows each of them."""
    with set_recurrent_mode(True):
        batch["state_value"] = critic(batch.copy())["state_value"]
    after = batch["next"].copy()  # a step on, from the state that each step has left
    after["is_init"] = torch.zeros_like(after["done"])
    following = critic(after)["state_value"]
    goes_on = ~batch["next", "done"][:, :-1]  # where it is the row's next value, of one memory
    following[:, :-1] = torch.where(goes_on, batch["state_value"][:, 1:], following[:, :-1])
    batch["next", "state_value"] = following


def train(options: Options) -> int:
    """Trains a policy; returns the exit code."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.torch_threads)
    make_env, policy = to_play(options)
    actor, critic = policy.module
    advantage = GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=None)
    loss_module = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=options.clip_epsilon,
        entropy_coeff=options.entropy_coefficient,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=False,  # `minibatches` does, over all learners
    )
    frames_per_batch = options.num_envs * options.sync_interval
    num_rounds = -(-options.total_frames // frames_per_batch)
    parameters = [*loss_module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=options.learning_rate, eps=1e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_rounds)
    delayed = DelayedGradient(actor, lag=options.lag)  # as in ppo_cartpole.py, not the critic
    parts = {"loss": loss_module, "optimizer": optimizer, "schedule": schedule, "delayed": delayed}
    size, seed = options.minibatch_size, options.seed

    with (
        learners(options) as world,  # this one, or as many as torchrun has started
        HTSCollector(
            [make_env] * options.num_envs,
            policy,  # the critic too, so that the collector carries its state
            frames_per_batch=frames_per_batch,
            total_frames=num_rounds * frames_per_batch,
            num_actors=options.num_actors,
            lag=options.lag,
            seed=seed,
            world=world,
        ) as collector,
        Run("ppo_recurrent", options, collector, make_env, parts) as run,
    ):
        for batch in run:  # the next round is already running
            with delayed(batch):  # the policy is the one that gathered this batch
                shards = world.parts(batch)  # one, but with --shards
                for shard in shards:
                    evaluate(critic, shard)
                    advantage(shard)
                for epoch in range(options.epochs):
                    for minibatch in minibatches(
                        world, shards, size, seed=seed, epoch=epoch, whole_rows=True
                    ):
                        losses = []
                        for part in world.gradients(loss_module, minibatch):
                            with set_recurrent_mode(True):
                                losses.append(loss_module(part))
                            loss_of(losses[-1]).backward()
                        norm = nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
                        optimizer.step()
                        optimizer.zero_grad()
                        run.record(losses, norm, schedule.get_last_lr()[0])
            schedule.step()
            collector.update_policy_weights_()  # the next round that opens acts with these
    return run.exit_code


if __name__ == "__main__":
    exit_with(lambda: train(OPTIONS))
