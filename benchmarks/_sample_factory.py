"""Sample Factory's APPO: asynchronous, a process for each worker, for inference and for learning.

Some of its requirements clash with ours. So it goes into an environment of its own, from which all
contenders can then be measured:

    make contenders
    .venv-contenders/bin/python benchmarks/throughput.py --workloads pong --trainings a2c5 \
        --contenders hts sample-factory

For football, `make football VENV=.venv-contenders` first, or else once more `make contenders` after
it: it brings a newer numpy.

It has the network, the batches and the weights of the other contenders' losses, and one thread that
learns, with PPO too, where others have one for each core. Its algorithm is its own: the loss is
PPO's with values clipped and the optimizer Adam, where others train with A2C too, and V-trace is
off. Workers with an even number of environments step one half while the other's actions are
inferred, and are pinned to cores.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
from _workloads import CORES, TRAININGS, A2COptions, PPOOptions, find_workload, make_agent
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.encoder import Encoder
from sample_factory.train import make_runner
from torch import Tensor

NAME = "cell"


def make_env(
    workload: str, num_envs: int, name: str, cfg: Any, env_config: Any, render_mode: str | None
) -> gym.Env[Any, Any]:
    """The environment of a worker; without `env_config` one that is only looked at."""
    index = 0 if env_config is None else env_config.env_id
    return find_workload(workload).factories(num_envs)[index]()


class Trunk(Encoder):  # type: ignore[misc]  # of a package without types
    """The trunk of all contenders."""

    def __init__(self, workload: str, cfg: Any, observation_space: Any) -> None:
        super().__init__(cfg)
        agent = make_agent(find_workload(workload))
        self.trunk = agent.trunk.module
        self.width = agent.logits.module.in_features

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        return self.trunk(observations["obs"])

    def get_out_size(self) -> int:
        return self.width


class Clock(AlgoObserver):  # type: ignore[misc]
    """Counts the iterations of the learner, and ends the run when there have been enough."""

    def __init__(self, seconds: float, warm_up: int) -> None:
        self.seconds = seconds
        self.warm_up = warm_up
        self.iterations = 0
        self.began = self.elapsed_s = 0.0

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        now = time.perf_counter()
        if training_iteration_since_resume <= self.warm_up:
            self.began = now
        elif self.elapsed_s < self.seconds:
            self.iterations = training_iteration_since_resume - self.warm_up
            self.elapsed_s = now - self.began
            if self.elapsed_s >= self.seconds:
                runner._stop_training()


def settings(workload: str, training: str, num_envs: int, directory: Path) -> dict[str, Any]:
    """Its options for a cell of the benchmark.

    Raises:
        ValueError: for what it can't do.
    """
    if TRAININGS[training].algorithm is None:
        raise ValueError("Sample Factory can't collect without learning")
    if training == "dqn5":
        raise ValueError("Sample Factory is measured with A2C and PPO alone")
    waits = find_workload(workload).waits
    workers = num_envs if waits else min(CORES, num_envs)
    per_worker, left_over = divmod(num_envs, workers)
    if left_over:
        raise ValueError(f"{num_envs} environments can't be shared out among {workers} workers")
    tested = TRAININGS[training]
    ppo = training == "ppo"
    options: A2COptions | PPOOptions = PPOOptions(epochs=4) if ppo else A2COptions()
    minibatches = 4 if ppo else 1
    if num_envs % minibatches:
        raise ValueError(
            f"{num_envs} environments' rollouts can't be shared out among {minibatches} minibatches"
        )
    return {
        "env": NAME,
        "experiment": NAME,
        "train_dir": directory,
        "device": "cpu",
        "num_workers": workers,
        "num_envs_per_worker": per_worker,
        "worker_num_splits": 2 if per_worker % 2 == 0 else 1,
        "rollout": tested.sync_interval,
        "batch_size": num_envs * tested.sync_interval // minibatches,
        "num_batches_per_epoch": minibatches,
        "num_epochs": 4 if ppo else 1,
        "learning_rate": options.learning_rate,
        "gamma": options.gamma,
        "gae_lambda": options.gae_lambda,
        "exploration_loss_coeff": options.entropy_coefficient,
        "value_loss_coeff": options.critic_coefficient,
        "max_grad_norm": options.max_grad_norm,
        "adam_eps": 1e-5,
        "ppo_clip_ratio": PPOOptions.clip_epsilon,
        "ppo_clip_value": PPOOptions.clip_epsilon,
        "shuffle_minibatches": ppo,
        # What the other contenders don't do either.
        "use_rnn": False,
        "normalize_input": False,
        "normalize_returns": False,
        "decorrelate_envs_on_one_worker": False,
        "log_to_file": False,
        "save_every_sec": 10**6,
        "save_best_every_sec": 10**6,
    }


def measure_sample_factory(
    workload: str, training: str, num_envs: int, seconds: float, warm_up: int
) -> dict[str, Any]:
    """Steps per second that its learner has learned from.

    Raises:
        RuntimeError: if it fails.
    """
    register_env(NAME, partial(make_env, workload, num_envs))
    global_model_factory().register_encoder_factory(partial(Trunk, workload))
    with tempfile.TemporaryDirectory() as directory:
        chosen = settings(workload, training, num_envs, Path(directory))
        arguments = [f"--{name}={value}" for name, value in chosen.items()]
        parser, _ = parse_sf_args(arguments)
        cfg, runner = make_runner(parse_full_cfg(parser, arguments))
        clock = Clock(seconds, warm_up)
        runner.register_observer(clock)
        status = runner.init()
        if status == ExperimentStatus.SUCCESS:
            status = runner.run()
    if status != ExperimentStatus.SUCCESS or clock.elapsed_s < seconds:
        raise RuntimeError(f"Sample Factory ended with status {status}")
    frames = clock.iterations * cfg.batch_size * cfg.num_batches_per_epoch
    return {
        "frames": frames,
        "batches": clock.iterations,
        "elapsed_s": clock.elapsed_s,
        "steps_per_second": frames / clock.elapsed_s,
        "threads": 1,
        "batch": [cfg.batch_size * cfg.num_batches_per_epoch // cfg.rollout, cfg.rollout],
    }
