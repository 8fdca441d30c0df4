"""SAC on continuous control with HTSCollector: gymnasium's MuJoCo tasks, and others like them.

Settings are those of CleanRL's sac_continuous_action.py; recipes/README.md says which differ. Each
round's steps go into a replay buffer, from which TorchRL's SACLoss, unchanged, learns while the
executors step on. The buffer holds steps of many older policies, so no gradient is delayed.

    python recipes/sac_mujoco.py --env-id HalfCheetah-v5

Ctrl-C saves and ends the run, --resume OUTPUT_DIR goes on with it, bit for bit.
"""

from __future__ import annotations

import warnings
from functools import partial

from support.continuous import make_bounded
from support.errors import exit_with
from support.required_return import check_return
from support.sac_options import SACOptions as Options
from support.start import begin

if __name__ == "__main__":  # before torch is imported, which takes seconds
    OPTIONS = begin(Options, __doc__)

import gymnasium as gym
import torch
from support.experience import Experience
from support.learners import learners
from support.run import Run
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from torchrl_hts import HTSCollector, UndelayedUpdateWarning

LOSSES = ("loss_actor", "loss_qvalue", "loss_alpha")


def make_networks(env: gym.Env, hidden: int) -> tuple[ProbabilisticActor, ValueOperator]:
    """A policy whose actions are squashed into their bounds, and a Q function."""
    (inputs,), (actions,) = env.observation_space.shape, env.action_space.shape
    mlp = partial(MLP, num_cells=[hidden, hidden], activation_class=nn.ReLU)
    net = nn.Sequential(mlp(inputs, 2 * actions), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={
            "low": torch.tensor(env.action_space.low),
            "high": torch.tensor(env.action_space.high),
        },
    )
    return actor, ValueOperator(mlp(inputs + actions, 1), in_keys=["observation", "action"])


def to_play(options: Options) -> tuple[partial[gym.Env], ProbabilisticActor]:
    """How environments are made, and the policy, untrained: for play.py."""
    make_env = partial(make_bounded, options.env_id)
    return make_env, make_networks(make_env(), options.hidden_units)[0]


def make_loss(
    actor: ProbabilisticActor, qvalue: ValueOperator, actions: gym.Space, options: Options
) -> SACLoss:
    """SAC's loss of a sample, with two Q functions and their targets."""
    loss_module = SACLoss(
        actor,
        qvalue,
        loss_function="l2",
        alpha_init=options.alpha or 1.0,
        fixed_alpha=options.alpha is not None,
        target_entropy=-float(actions.shape[0]),
    )
    loss_module.make_value_estimator(gamma=options.gamma)
    return loss_module


def make_optimizer(loss_module: SACLoss, options: Options) -> torch.optim.Optimizer:
    """Adam, with a learning rate for the policy and one for all else."""
    of_policy = list(loss_module.actor_network_params.parameters())
    known = set(map(id, of_policy))
    others = [each for each in loss_module.parameters() if id(each) not in known]
    return torch.optim.Adam(
        [
            {"params": of_policy, "lr": options.learning_rate},
            {"params": others, "lr": options.critic_learning_rate},
        ]
    )


def train(options: Options) -> int:
    """Trains a policy; returns the exit code."""
    warnings.simplefilter("ignore", UndelayedUpdateWarning)  # nothing to delay: see above
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.torch_threads)
    make_env = partial(make_bounded, options.env_id)
    env = make_env()
    actor, qvalue = make_networks(env, options.hidden_units)
    loss_module = make_loss(actor, qvalue, env.action_space, options)
    target = SoftUpdate(loss_module, tau=options.tau)
    optimizer = make_optimizer(loss_module, options)
    parameters = list(loss_module.parameters())
    parts = {"loss": loss_module, "optimizer": optimizer}

    with learners(options) as world:  # this one, or as many as torchrun has started
        experience = Experience(world, loss_module.in_keys, options)  # the replay buffer
        own = {"experience": experience}
        with (
            HTSCollector(
                [make_env] * options.num_envs,
                actor,
                frames_per_batch=options.frames_per_batch,
                total_frames=options.num_rounds * options.frames_per_batch,
                init_random_frames=options.init_random_frames,
                num_actors=options.num_actors,
                lag=options.lag,
                seed=options.seed,
                world=world,
            ) as collector,
            Run("sac_mujoco", options, collector, make_env, parts, own_parts=own) as run,
        ):
            for batch in run:  # the next round is already running
                experience.extend(batch)
                if run.step < options.init_random_frames:
                    run.record_none(loss_module.out_keys)
                    continue
                for _ in range(options.updates_per_batch):
                    losses = []
                    for part in world.gradients(loss_module, experience.sample()):
                        losses.append(loss_module(part))
                        sum(losses[-1][name] for name in LOSSES).backward()
                    norm = nn.utils.get_total_norm([each.grad for each in parameters])
                    optimizer.step()
                    optimizer.zero_grad()
                    target.step()
                    run.record(losses, norm, options.learning_rate)
                collector.update_policy_weights_()  # the next round that opens acts with these
    check_return(run, world)
    return run.exit_code


if __name__ == "__main__":
    exit_with(lambda: train(OPTIONS))
