"""PPO on an Atari game with HTSCollector and DelayedGradient: TorchRL's ClipPPOLoss and GAE.

Games run in executors and an actor runs the policy while this process learns from the round
before. Actor and critic share the Nature CNN. Rewards are clipped to their sign for learning; the
returns that are reported are the game's true score.

    python recipes/ppo_atari.py --env-id ALE/Breakout-v5

Ctrl-C saves a checkpoint and ends the run; --resume OUTPUT_DIR goes on with it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from support.errors import exit_with
from support.pixel_options import AtariOptions, PPOOptions
from support.start import begin


@dataclass(frozen=True)
class Options(AtariOptions, PPOOptions):
    """What is trained on what; by default as in Schulman et al. 2017, with the losses of CleanRL.

    The clip stays at 0.1, and the squared error of the values, which is clipped too, has a weight
    of 0.25. In the paper the clip decays to 0 with the learning rate, and the weight is 1.
    """


if __name__ == "__main__":  # before torch is imported, which takes seconds
    OPTIONS = begin(Options, __doc__)

import gymnasium as gym
import torch
from support.atari import VIDEO_FPS, eval_env, train_env
from support.learners import learners
from support.pixels import Agent, make_collector, on_device
from support.ppo import PPO
from support.run import Run
from tensordict.nn import TensorDictSequential

from torchrl_hts import DelayedGradient, keep_large_blocks


def to_play(options: Options) -> tuple[Callable[..., gym.Env], TensorDictSequential]:
    """How environments of evaluations are made, and the policy, untrained: for play.py."""
    make_env = eval_env(options)
    return make_env, Agent(make_env()).actor_critic


def train(options: Options) -> int:
    """Trains a policy; returns the exit code."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.torch_threads)
    keep_large_blocks()
    make_env = train_env(options)
    agent = on_device(Agent(make_env()), options.device)

    with (
        learners(options) as world,
        make_collector(options, make_env, agent.actor_critic, world) as collector,
    ):
        ppo = PPO(agent, options, len(collector), world)
        delayed = DelayedGradient(ppo.model, lag=options.lag, gradient_at=options.gradient_at)
        parts = {
            "model": ppo.model,
            "optimizer": ppo.optimizer,
            "schedule": ppo.schedule,
            "delayed": delayed,
        }
        make_eval_env = eval_env(options)
        with Run("ppo_atari", options, collector, make_eval_env, parts, video_fps=VIDEO_FPS) as run:
            for batch in run:  # the next round is already running
                batch["next", "reward"].sign_()
                learning_rate = ppo.schedule.get_last_lr()[0]
                with delayed(batch):  # by default, parameters are the ones that gathered this batch
                    for losses, norm in ppo.learn(batch):
                        run.record(losses, norm, learning_rate)
                ppo.schedule.step()
                collector.update_policy_weights_()  # the next round that opens acts with these
    return run.exit_code


if __name__ == "__main__":
    exit_with(lambda: train(OPTIONS))
