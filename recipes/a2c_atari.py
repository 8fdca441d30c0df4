"""A2C on an Atari game with HTSCollector and DelayedGradient: TorchRL's A2CLoss and GAE.

Sixteen games run in executors and an actor runs the policy while this process learns from the
round before. Actor and critic share the Nature CNN. Rewards are clipped to their sign for learning;
the returns that are reported are the game's true score.

    python recipes/a2c_atari.py --env-id ALE/Breakout-v5

Prints the progress, and leaves config.json, metrics.csv, curve.png and the trained policy.pt in the
output directory; Ctrl-C ends the run early and leaves the same files.
"""

# Axes: N environments, T steps of one batch (alpha), C frames of one observation.

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from _support import Metrics, RunLog, option, parse_config
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, EpisodeReturns, HTSCollector
from torchrl_hts.envs import make_atari


@dataclass(frozen=True)
class Config:
    """The defaults are those of the literature (Mnih et al. 2016, Kostrikov's A2C)."""

    env_id: str = option("ALE/Pong-v5", "id of ale-py")
    seed: int = option(0, "seed of the games and the policy")
    total_frames: int = option(10_000_000, "environment steps in all, of 4 emulator frames each")
    num_envs: int = option(16, "games played at the same time")
    sync_interval: int = option(5, "steps per game and round: A2C's unroll length (alpha)")
    lag: int = option(1, "updates that the behaviour parameters are behind; 0 is synchronous")
    num_actors: int = option(1, "processes that run the policy")
    num_executors: int | None = option(None, "processes that step games; by default one per core")
    learning_rate: float = option(7e-4, "of RMSprop; decays linearly to 0")
    gamma: float = option(0.99, "discount")
    gae_lambda: float = option(1.0, "lambda of the advantage estimator; 1 is the n-step return")
    entropy_coefficient: float = option(0.01, "weight of the entropy bonus")
    critic_coefficient: float = option(0.5, "weight of the value loss")
    max_grad_norm: float = option(0.5, "gradients are clipped to this norm")
    terminal_on_life_loss: bool = option(False, "each life is an episode of its own")
    sticky_actions: bool = option(False, "repeat the last action with probability 0.25")
    log_interval: int = option(4_000, "steps between two rows of metrics.csv")
    torch_threads: int = option(1, "threads of the learner; more where cores are left over")
    output_dir: Path | None = option(None, "by default runs/a2c_atari/GAME-DATE-TIME")


class NatureCNN(nn.Module):
    """The trunk of Mnih et al. (2015): uint8 ``[..., C, 84, 84]`` to float32 ``[..., 512]``."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 32, kernel_size=8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
        )
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                orthogonal(layer, 2**0.5)

    def forward(self, frames: Tensor) -> Tensor:
        pixels = frames.flatten(0, -4).float() / 255.0
        if torch.is_grad_enabled():  # in this order the pass back takes a fifth less on a CPU
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        return self.layers(pixels).unflatten(0, frames.shape[:-3])


def orthogonal(layer: nn.Conv2d | nn.Linear, gain: float) -> nn.Conv2d | nn.Linear:
    """Initialises a layer as the literature does, and returns it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def encode(trunk: TensorDictModule, batch: TensorDictBase) -> None:
    """Writes ``"hidden"`` and ``("next", "hidden")``, running each frame through the trunk once.

    A2CLoss and GAE read those instead of the frames, where each would run the shared trunk for
    itself: four times forward and twice back. A step's next observation is the observation of the
    step after it, so only the last step of each row, and steps that were cut off before their
    end, have a next observation to run on top. Where an episode has ended by itself GAE makes no
    use of the value of what follows.
    """
    trunk(batch)  # with gradients, for the loss
    with torch.no_grad():
        hidden = batch["hidden"].roll(-1, dims=1)  # [N, T, 512]
        missing = batch["next", "truncated"].squeeze(-1).clone()  # [N, T]
        missing[:, -1] = True
        hidden[missing] = trunk.module(batch["next", "observation"][missing])
        batch["next", "hidden"] = hidden


def train(config: Config, log: RunLog) -> None:
    """Trains a policy, and saves it even if the run is ended early."""
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.torch_threads)
    make_env = partial(
        make_atari,
        config.env_id,
        terminal_on_life_loss=config.terminal_on_life_loss,
        sticky_actions=config.sticky_actions,
    )
    env = make_env()
    num_actions = int(env.action_space.n)

    trunk = TensorDictModule(
        NatureCNN(env.observation_space.shape[0]), in_keys=["observation"], out_keys=["hidden"]
    )
    actor_head = ProbabilisticActor(
        TensorDictModule(orthogonal(nn.Linear(512, num_actions), 0.01), ["hidden"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic_head = ValueOperator(orthogonal(nn.Linear(512, 1), 1.0), in_keys=["hidden"])
    policy = TensorDictSequential(trunk, actor_head).select_out_keys("action", "action_log_prob")

    frames_per_batch = config.num_envs * config.sync_interval
    num_rounds = -(-config.total_frames // frames_per_batch)
    collector = HTSCollector(
        [make_env] * config.num_envs,
        policy,
        frames_per_batch=frames_per_batch,
        total_frames=num_rounds * frames_per_batch,
        num_actors=config.num_actors,
        num_executors=config.num_executors,
        lag=config.lag,
        seed=config.seed,
    )

    advantage = GAE(gamma=config.gamma, lmbda=config.gae_lambda, value_network=critic_head)
    loss_module = A2CLoss(
        actor_head,
        critic_head,
        entropy_coeff=config.entropy_coefficient,
        critic_coeff=config.critic_coefficient,
        loss_critic_type="l2",
    )
    model = nn.ModuleList([trunk, loss_module])  # all that is trained
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=config.learning_rate, alpha=0.99, eps=1e-5
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_rounds)
    delayed = DelayedGradient(model, lag=config.lag)

    returns = EpisodeReturns()
    next_log = config.log_interval
    try:
        for round_index, batch in enumerate(collector):  # the next round is already running
            returns.update(batch)
            batch["next", "reward"].sign_()
            with delayed(batch):  # parameters are the ones that gathered this batch
                encode(trunk, batch)
                with torch.no_grad():
                    advantage(batch)
                losses = loss_module(batch.reshape(-1))
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            learning_rate = schedule.get_last_lr()[0]
            schedule.step()
            collector.update_policy_weights_()  # the next round that opens acts with these

            frames = (round_index + 1) * frames_per_batch
            if frames >= next_log or round_index + 1 == num_rounds:
                next_log += config.log_interval
                statistics = collector.statistics()
                log.add(
                    Metrics(
                        frames=frames,
                        elapsed_s=statistics.elapsed_s,
                        frames_per_second=statistics.frames_per_second,
                        episodes=returns.count,
                        train_return=returns.mean,
                        learner_waiting_share=statistics.learner_waiting_share,
                        loss=loss.item(),
                        entropy=losses["entropy"].item(),
                        learning_rate=learning_rate,
                        evaluation_return=math.nan,
                    )
                )
    except KeyboardInterrupt:
        log.say("interrupted: the run ends here")
    finally:
        collector.shutdown()
        torch.save(policy.state_dict(), log.output_dir / "policy.pt")


def main() -> None:
    """Parses the flags and trains."""
    config = parse_config(Config, __doc__)
    game = config.env_id.removeprefix("ALE/")
    started = f"{datetime.now():%Y%m%d-%H%M%S}"
    output_dir = config.output_dir or Path("runs", "a2c_atari", f"{game}-{started}")
    with RunLog(output_dir, config, config.total_frames, f"A2C on {config.env_id}") as log:
        train(config, log)
    print(f"metrics.csv, curve.png and policy.pt are in {output_dir}")


if __name__ == "__main__":
    main()
