"""PPO on an Atari game with HTSCollector and DelayedGradient: TorchRL's ClipPPOLoss and GAE.

Games run in executors and an actor runs the policy while this process learns from the round
before. Actor and critic share the Nature CNN. Rewards are clipped to their sign for learning; the
returns that are reported are the game's true score.

    python recipes/ppo_atari.py --env-id ALE/Breakout-v5

Ctrl-C saves a checkpoint and ends the run; --resume OUTPUT_DIR goes on with it, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.atari import VIDEO_FPS, AtariOptions, eval_env, train_env
from support.errors import exit_with
from support.options import option, parse_options
from support.pixels import Agent, make_collector
from support.run import Run
from torch import nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient


@dataclass(frozen=True)
class Options(AtariOptions):
    """Options of PPO; the defaults are those of the literature (Schulman et al. 2017)."""

    num_envs: int = option(8, "games played at the same time", least=1)
    sync_interval: int = option(128, "steps per game and round (alpha)", least=1)
    learning_rate: float = option(2.5e-4, "of Adam; decays linearly to 0", least=0)
    gae_lambda: float = option(0.95, "lambda of the advantage estimator", least=0, most=1)
    epochs: int = option(3, "passes over each batch", least=1)
    minibatch_size: int = option(256, "steps per optimizer step", least=1)
    clip_epsilon: float = option(0.1, "how far PPO's ratio, and the value, may move", least=0)


def train(options: Options) -> int:
    """Trains a policy; returns the exit code."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.torch_threads)
    make_env = train_env(options)
    agent = Agent(make_env())

    advantage = GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=None)
    loss_module = ClipPPOLoss(
        agent.actor_head,
        agent.critic_head,
        clip_epsilon=options.clip_epsilon,
        clip_value=options.clip_epsilon,
        entropy_coeff=options.entropy_coefficient,
        critic_coeff=options.critic_coefficient,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    model = nn.ModuleList([agent.trunk, loss_module])  # all that is trained
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate, eps=1e-5)
    delayed = DelayedGradient(model, lag=options.lag)

    with make_collector(options, make_env, agent.actor_critic) as collector:
        schedule = torch.optim.lr_scheduler.LinearLR(
            optimizer, 1.0, 0.0, total_iters=len(collector)
        )
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "delayed": delayed}
        make_eval_env = eval_env(options)
        with Run("ppo_atari", options, collector, make_eval_env, parts, video_fps=VIDEO_FPS) as run:
            for batch in run:  # the next round is already running
                batch["next", "reward"].sign_()
                with delayed(batch):  # parameters are the ones that gathered this batch
                    agent.evaluate_next(batch)
                    advantage(batch)  # of the values that the actors have computed
                    steps = batch.exclude("next").reshape(-1)
                    for _ in range(options.epochs):
                        for indices in torch.randperm(len(steps)).split(options.minibatch_size):
                            minibatch = agent.trunk(steps[indices])
                            losses = loss_module(minibatch)
                            loss = (
                                losses["loss_objective"]
                                + losses["loss_critic"]
                                + losses["loss_entropy"]
                            )
                            loss.backward()
                            norm = nn.utils.clip_grad_norm_(
                                model.parameters(), options.max_grad_norm
                            )
                            optimizer.step()
                            optimizer.zero_grad()
                            run.record(losses, norm, schedule.get_last_lr()[0])
                schedule.step()
                collector.update_policy_weights_()  # the next round that opens acts with these
    return run.exit_code


if __name__ == "__main__":
    exit_with(lambda: train(parse_options(Options, __doc__)))
