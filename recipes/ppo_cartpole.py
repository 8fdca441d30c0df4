"""PPO on CartPole-v1 with HTSCollector and DelayedGradient: TorchRL's own loss, unchanged.

Executors step the environments and an actor runs the policy while this process learns. Each round
is gathered by parameters that are one update old, and DelayedGradient takes the gradients of a
round at the parameters that gathered it, so that PPO starts each update exactly on-policy.

    python recipes/ppo_cartpole.py --require-return 475

Prints the progress, and leaves config.json, metrics.csv and curve.png in the output directory.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import gymnasium as gym
import torch
from _support import Metrics, RunLog, option, parse_config
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, EpisodeReturns, HTSCollector


@dataclass(frozen=True)
class Config:
    """The defaults solve CartPole-v1 with every seed that was tried."""

    env_id: str = option("CartPole-v1", "gymnasium id; Box observations, Discrete actions")
    seed: int = option(0, "seed of the environments, the policy and the minibatches")
    total_frames: int = option(200_000, "environment steps in all")
    num_envs: int = option(16, "environments")
    sync_interval: int = option(32, "steps per environment and round (alpha)")
    lag: int = option(1, "updates that the behaviour parameters are behind; 0 is synchronous")
    num_actors: int = option(1, "processes that run the policy")
    epochs: int = option(8, "passes over each batch")
    minibatch_size: int = option(256, "steps per optimizer step")
    learning_rate: float = option(1e-3, "of Adam; decays linearly to 0")
    gamma: float = option(0.98, "discount")
    gae_lambda: float = option(0.8, "lambda of the advantage estimator")
    clip_epsilon: float = option(0.2, "how far PPO's ratio may move from 1")
    entropy_coefficient: float = option(0.0, "weight of the entropy bonus")
    max_grad_norm: float = option(0.5, "gradients are clipped to this norm")
    hidden_units: int = option(64, "width of the two hidden layers of each network")
    eval_interval: int = option(20_000, "steps between two evaluations")
    eval_episodes: int = option(20, "episodes of each evaluation")
    torch_threads: int = option(1, "threads of the learner; small networks gain nothing from more")
    require_return: float | None = option(
        None, "exit with an error unless the last evaluation's mean return reaches this"
    )
    output_dir: Path | None = option(None, "by default runs/ppo_cartpole/DATE-TIME")


def make_networks(env: gym.Env, hidden_units: int) -> tuple[ProbabilisticActor, ValueOperator]:
    """A policy and a value function with a trunk each, orthogonally initialised."""
    num_inputs = env.observation_space.shape[0]
    num_actions = int(env.action_space.n)

    def mlp(outputs: int, output_gain: float) -> nn.Sequential:
        layers = [
            nn.Linear(num_inputs, hidden_units),
            nn.Tanh(),
            nn.Linear(hidden_units, hidden_units),
            nn.Tanh(),
            nn.Linear(hidden_units, outputs),
        ]
        for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, output_gain), strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(*layers)

    actor = ProbabilisticActor(
        TensorDictModule(mlp(num_actions, 0.01), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return actor, ValueOperator(mlp(1, 1.0), in_keys=["observation"])


@torch.no_grad()
@set_exploration_type(ExplorationType.DETERMINISTIC)
def evaluate(actor: ProbabilisticActor, env_id: str, episodes: int, seed: int) -> float:
    """Mean return of greedy play, one episode in each of ``episodes`` environments."""
    envs = [gym.make(env_id) for _ in range(episodes)]
    observations = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
    playing = list(range(episodes))
    total = 0.0
    while playing:
        stacked = torch.stack([torch.as_tensor(observations[i]) for i in playing])
        actions = actor(TensorDict({"observation": stacked}, [len(playing)]))["action"].tolist()
        ended = set()
        for i, action in zip(playing, actions, strict=True):
            observations[i], reward, terminated, truncated, _ = envs[i].step(action)
            total += float(reward)
            if terminated or truncated:
                ended.add(i)
        playing = [i for i in playing if i not in ended]
    return total / episodes


def train(config: Config, log: RunLog) -> float:
    """Trains a policy; returns the mean return of its last evaluation."""
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.torch_threads)
    make_env = partial(gym.make, config.env_id)
    actor, critic = make_networks(make_env(), config.hidden_units)

    frames_per_batch = config.num_envs * config.sync_interval
    num_rounds = -(-config.total_frames // frames_per_batch)
    collector = HTSCollector(
        [make_env] * config.num_envs,
        actor,
        frames_per_batch=frames_per_batch,
        total_frames=num_rounds * frames_per_batch,
        num_actors=config.num_actors,
        lag=config.lag,
        seed=config.seed,
    )

    advantage = GAE(gamma=config.gamma, lmbda=config.gae_lambda, value_network=critic)
    loss_module = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=config.clip_epsilon,
        entropy_coeff=config.entropy_coefficient,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=config.learning_rate, eps=1e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_rounds)
    delayed = DelayedGradient(loss_module, lag=config.lag)

    returns = EpisodeReturns()
    next_eval = config.eval_interval
    evaluation_return = math.nan
    try:
        for round_index, batch in enumerate(collector):  # the next round is already running
            returns.update(batch)
            with delayed(batch):  # parameters are the ones that gathered this batch
                with torch.no_grad():
                    advantage(batch)
                steps = batch.reshape(-1)
                for _ in range(config.epochs):
                    for indices in torch.randperm(len(steps)).split(config.minibatch_size):
                        losses = loss_module(steps[indices])
                        loss = (
                            losses["loss_objective"]
                            + losses["loss_critic"]
                            + losses["loss_entropy"]
                        )
                        loss.backward()
                        nn.utils.clip_grad_norm_(loss_module.parameters(), config.max_grad_norm)
                        optimizer.step()
                        optimizer.zero_grad()
            learning_rate = schedule.get_last_lr()[0]
            schedule.step()
            collector.update_policy_weights_()  # the next round that opens acts with these

            frames = (round_index + 1) * frames_per_batch
            evaluation_due = frames >= next_eval or round_index + 1 == num_rounds
            if evaluation_due:  # on the newest parameters, on seeds that training never sees
                next_eval += config.eval_interval
                evaluation_return = evaluate(
                    actor, config.env_id, config.eval_episodes, seed=10_000 + config.seed
                )
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
                    evaluation_return=evaluation_return if evaluation_due else math.nan,
                )
            )
    finally:
        collector.shutdown()
    return evaluation_return


def main() -> None:
    """Parses the flags, trains, and checks the result."""
    config = parse_config(Config, __doc__)
    started = f"{datetime.now():%Y%m%d-%H%M%S}"
    output_dir = config.output_dir or Path("runs", "ppo_cartpole", started)
    with RunLog(output_dir, config, config.total_frames, f"PPO on {config.env_id}") as log:
        evaluation_return = train(config, log)
    print(
        f"mean evaluation return {evaluation_return:.1f} over {config.eval_episodes} episodes; "
        f"metrics.csv and curve.png are in {output_dir}"
    )
    if config.require_return is not None and not evaluation_return >= config.require_return:
        sys.exit(
            f"error: the mean evaluation return {evaluation_return:.1f} is below the required "
            f"{config.require_return:.1f}; try more --total-frames or another --seed"
        )


if __name__ == "__main__":
    main()
