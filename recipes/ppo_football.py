"""PPO on Google Research Football with HTSCollector and DelayedGradient, as in the HTS-RL paper.

Games run in executors and an actor runs the policy while this process learns from the round
before. Actor and critic share the Nature CNN on stacked minimaps. Training rewards goals and
checkpoints; evaluations reward goals alone, so that their returns are the score, goals for less
goals against.

    python recipes/ppo_football.py --scenario academy_3_vs_1_with_keeper

Ctrl-C saves a checkpoint and ends the run; --resume OUTPUT_DIR goes on with it, bit for bit with
the engine gfootball (EnvPool's games can't be saved: they begin anew).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from support.errors import exit_with
from support.options import option, parse_options
from support.pixels import Agent, PixelOptions, make_collector
from support.run import Run
from torch import nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient
from torchrl_hts.envs import make_football


@dataclass(frozen=True)
class Options(PixelOptions):
    """Options of PPO; the defaults are those of Liu, Yeh and Schwing (2020)."""

    scenario: str = option("academy_empty_goal_close", "what is played, as gfootball names it")
    engine: Literal["gfootball", "envpool"] = option("gfootball", "which package plays it")
    checkpoint_rewards: bool = option(
        True, "training also rewards bringing the ball near the goal, not goals alone"
    )
    total_frames: int = option(5_000_000, "environment steps in all", least=1)
    sync_interval: int = option(128, "steps per game and round (alpha)", least=1)
    learning_rate: float = option(3.43e-4, "of Adam; decays linearly to 0", least=0)
    gamma: float = option(0.993, "discount", least=0, most=1)
    gae_lambda: float = option(0.95, "lambda of the advantage estimator", least=0, most=1)
    epochs: int = option(2, "passes over each batch", least=1)
    minibatches: int = option(8, "optimizer steps of each pass", least=1)
    clip_epsilon: float = option(0.08, "how far PPO's ratio, and the value, may move", least=0)
    entropy_coefficient: float = option(0.003, "weight of the entropy bonus", least=0)
    critic_coefficient: float = option(0.5, "weight of half the squared value error", least=0)
    max_grad_norm: float = option(0.64, "gradients are clipped to this norm", least=0)

    @property
    def task(self) -> str:
        """What is learned."""
        return self.scenario


def train(options: Options) -> int:
    """Trains a policy; returns the exit code."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.torch_threads)
    make_eval_env = partial(
        make_football, options.scenario, engine=options.engine, rewards="scoring"
    )
    rewards = "scoring,checkpoints" if options.checkpoint_rewards else "scoring"
    make_env = partial(make_eval_env, rewards=rewards)
    agent = Agent(make_env())

    advantage = GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=None)
    loss_module = ClipPPOLoss(
        agent.actor_head,
        agent.critic_head,
        clip_epsilon=options.clip_epsilon,
        clip_value=options.clip_epsilon,
        entropy_coeff=options.entropy_coefficient,
        critic_coeff=options.critic_coefficient / 2,  # TorchRL's "l2" is the whole square
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
        minibatch_size = -(-collector.frames_per_batch // options.minibatches)
        with Run("ppo_football", options, collector, make_eval_env, parts) as run:
            for batch in run:  # the next round is already running
                with delayed(batch):  # parameters are the ones that gathered this batch
                    agent.evaluate_next(batch)
                    advantage(batch)  # of the values that the actors have computed
                    steps = batch.exclude("next").reshape(-1)
                    for _ in range(options.epochs):
                        for indices in torch.randperm(len(steps)).split(minibatch_size):
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
