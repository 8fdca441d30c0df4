"""A2C on an Atari game with HTSCollector and DelayedGradient: TorchRL's A2CLoss and GAE.

Games run in executors and an actor runs the policy while this process learns from the round
before. Actor and critic share the Nature CNN. Rewards are clipped to their sign for learning; the
returns that are reported are the game's true score.

    python recipes/a2c_atari.py --env-id ALE/Breakout-v5

Ctrl-C saves a checkpoint and ends the run; --resume OUTPUT_DIR goes on with it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from support.errors import exit_with
from support.options import option
from support.pixel_options import AtariOptions, PixelOptions
from support.start import begin


@dataclass(frozen=True)
class Options(AtariOptions, PixelOptions):
    """Options of A2C; the defaults are those of the literature (Mnih et al. 2016, Kostrikov)."""

    learning_rate: float = option(7e-4, "of RMSprop; decays linearly to 0", least=0)
    gae_lambda: float = option(
        1.0, "lambda of the advantage estimator; 1 is the n-step return", least=0, most=1
    )


if __name__ == "__main__":  # before torch is imported, which takes seconds
    OPTIONS = begin(Options, __doc__)

import gymnasium as gym
import torch
from support.atari import VIDEO_FPS, eval_env, train_env
from support.learners import learners, loss_of
from support.pixels import Agent, encode, make_collector, on_device
from support.run import Run
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, World, keep_large_blocks


class A2C:
    """TorchRL's A2CLoss, GAE and RMSprop, for one round's batch at a time.

    Attributes:
        model: all that is trained.
        optimizer: RMSprop.
        schedule: of its learning rate, for `num_rounds` rounds.
    """

    def __init__(
        self, agent: Agent, options: Options, num_rounds: int, world: World | None = None
    ) -> None:
        self._world = world or World()
        self._agent = agent
        self._options = options
        # Of values that are in the batch: over a network it runs a vmap, which takes longer.
        self._advantage = GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=None)
        self._loss_module = A2CLoss(
            agent.actor_head,
            agent.critic_head,
            entropy_coeff=options.entropy_coefficient,
            critic_coeff=options.critic_coefficient,
            loss_critic_type="l2",
        )
        self.model = nn.ModuleList([agent.trunk, self._loss_module])
        self.optimizer = torch.optim.RMSprop(
            self.model.parameters(), lr=options.learning_rate, alpha=0.99, eps=1e-5
        )
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1.0, 0.0, total_iters=num_rounds
        )

    def learn(self, batch: TensorDictBase) -> tuple[list[TensorDictBase], Tensor]:
        """Takes the optimizer's step; returns the losses of each part, and the gradient's norm."""
        losses = []
        for part in self._world.gradients(self.model, batch):  # the batch, but with --shards
            encode(self._agent.trunk, part)
            with torch.no_grad():
                for each in (part, part["next"]):
                    self._agent.critic_head(each)
                self._advantage(part)
            losses.append(self._loss_module(part.exclude("next").reshape(-1)))
            loss_of(losses[-1]).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._options.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm


def to_play(options: Options) -> tuple[Callable[..., gym.Env], TensorDictSequential]:
    """How environments of evaluations are made, and the policy, untrained: for play.py."""
    make_env = eval_env(options)
    return make_env, Agent(make_env()).policy


def train(options: Options) -> int:
    """Trains a policy; returns the exit code."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.torch_threads)
    keep_large_blocks()
    make_env = train_env(options)
    agent = on_device(Agent(make_env()), options.device)

    with (
        learners(options) as world,
        make_collector(options, make_env, agent.policy, world) as collector,
    ):
        a2c = A2C(agent, options, len(collector), world)
        delayed = DelayedGradient(a2c.model, lag=options.lag, gradient_at=options.gradient_at)
        parts = {
            "model": a2c.model,
            "optimizer": a2c.optimizer,
            "schedule": a2c.schedule,
            "delayed": delayed,
        }
        make_eval_env = eval_env(options)
        with Run("a2c_atari", options, collector, make_eval_env, parts, video_fps=VIDEO_FPS) as run:
            for batch in run:  # the next round is already running
                batch["next", "reward"].sign_()
                with delayed(batch):  # by default, parameters are the ones that gathered this batch
                    losses, norm = a2c.learn(batch)
                run.record(losses, norm, a2c.schedule.get_last_lr()[0])
                a2c.schedule.step()
                collector.update_policy_weights_()  # the next round that opens acts with these
    return run.exit_code


if __name__ == "__main__":
    exit_with(lambda: train(OPTIONS))
