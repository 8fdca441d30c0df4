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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from support.errors import exit_with
from support.options import option
from support.pixel_options import PPOOptions
from support.start import begin


@dataclass(frozen=True)
class Options(PPOOptions):
    """What is trained on what; all defaults are those of Liu, Yeh and Schwing (2020)."""

    scenario: str = option("academy_empty_goal_close", "what is played, as gfootball names it")
    engine: Literal["gfootball", "envpool"] = option("gfootball", "which package plays it")
    checkpoint_rewards: bool = option(
        True, "training also rewards bringing the ball near the goal, not goals alone"
    )
    total_frames: int = option(5_000_000, "environment steps in all", least=1)
    num_envs: int = option(16, "games played at the same time", least=1, most=2048)
    learning_rate: float = option(3.43e-4, "of Adam; decays linearly to 0", least=0)
    gamma: float = option(0.993, "discount", least=0, most=1)
    epochs: int = option(2, "passes over each batch", least=1)
    clip_epsilon: float = option(
        0.08, "how far PPO's ratio, and the value, may move", least=0, most=1
    )
    entropy_coefficient: float = option(0.003, "weight of the entropy bonus", least=0)
    max_grad_norm: float = option(0.64, "gradients are clipped to this norm", least=0)

    @property
    def task(self) -> str:
        """What is learned."""
        return self.scenario

    def check_task(self) -> None:
        """Find out whether there is such a scenario."""
        from torchrl_hts.envs import check_football

        check_football(self.scenario)


if __name__ == "__main__":  # before torch is imported, which takes seconds
    OPTIONS = begin(Options, __doc__)

import gymnasium as gym
import torch
from support.learners import learners
from support.pixels import Agent, make_collector, on_device
from support.ppo import PPO
from support.run import Run
from tensordict.nn import TensorDictSequential

from torchrl_hts import DelayedGradient, keep_large_blocks
from torchrl_hts.envs import make_football


def train_env(options: Options) -> Callable[..., gym.Env]:
    """Makes the game to train on."""
    rewards = "scoring,checkpoints" if options.checkpoint_rewards else "scoring"
    return partial(eval_env(options), rewards=rewards)


def eval_env(options: Options) -> Callable[..., gym.Env]:
    """Makes the game to evaluate on, where goals alone count."""
    return partial(make_football, options.scenario, engine=options.engine, rewards="scoring")


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
        with Run("ppo_football", options, collector, eval_env(options), parts) as run:
            for batch in run:  # the next round is already running
                learning_rate = ppo.schedule.get_last_lr()[0]
                with delayed(batch):  # by default, parameters are the ones that gathered this batch
                    for losses, norm in ppo.learn(batch):
                        run.record(losses, norm, learning_rate)
                ppo.schedule.step()
                collector.update_policy_weights_()  # the next round that opens acts with these
    return run.exit_code


if __name__ == "__main__":
    exit_with(lambda: train(OPTIONS))
