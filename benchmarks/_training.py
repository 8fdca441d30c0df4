"""The training of one contender of `learning.py`, which goes on where it was when it is stopped."""

from __future__ import annotations

import csv
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import _recipes  # noqa: F401  so that the recipes are found
import gymnasium as gym
import ppo_atari
import ppo_football
import torch
from _contenders import serial, wrap
from _curves import COLUMNS, WINDOW
from _workloads import CORES
from support import atari
from support.pixel_options import PPOOptions
from support.pixels import Agent, make_collector
from support.ppo import PPO
from torch import Tensor
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import ParallelEnv

from torchrl_hts import DelayedGradient, EpisodeReturns

MakeEnv = Callable[[], gym.Env[Any, Any]]
SAVE_EVERY_S = 300.0
SHOW_EVERY_S = 30.0


def game_of(options: PPOOptions) -> MakeEnv:
    """Makes the game to train on."""
    if isinstance(options, ppo_football.Options):
        return ppo_football.train_env(options)
    assert isinstance(options, ppo_atari.Options)
    return atari.train_env(options)


def score(options: PPOOptions, episode_return: float) -> float:
    """What an episode counts: its return, or in football the goals for and against.

    Scenarios of the academy end with the first goal. The rewards of checkpoints come to at most 1,
    and in an episode with a goal to just that.
    """
    if isinstance(options, ppo_football.Options) and options.checkpoint_rewards:
        return float(episode_return > 1.5) - float(episode_return < 0)
    return episode_return


def make_contender(name: str, options: PPOOptions, agent: Agent) -> Any:
    """A collector of ``[num_envs, sync_interval]`` batches with the actors' values in them."""
    make_env = game_of(options)
    if name.startswith("hts"):
        return make_collector(options, make_env, agent.actor_critic)
    factories = [make_env] * options.num_envs
    frames_per_batch = options.num_envs * options.sync_interval
    sizes = {
        "frames_per_batch": frames_per_batch,
        "total_frames": -(-options.total_frames // frames_per_batch) * frames_per_batch,
    }
    if name == "parallel":
        env = ParallelEnv(options.num_envs, [partial(wrap, factory) for factory in factories])
        env.set_seed(options.seed)
        return Collector(env, agent.actor_critic, **sizes)
    workers = min(CORES, options.num_envs)
    shares = [partial(serial, factories[worker::workers]) for worker in range(workers)]
    return MultiSyncCollector(shares, agent.actor_critic, **sizes, cat_results=0)


@dataclass(frozen=True)
class Kept:
    """The policy at a moment of a run."""

    elapsed_s: float
    steps: int
    values: dict[str, Tensor]

    @classmethod
    def now(cls, elapsed_s: float, steps: int, agent: Agent) -> Kept:
        """A copy."""
        values = {key: each.clone() for key, each in agent.policy.state_dict().items()}
        return cls(elapsed_s, steps, values)


def policies(file: Path) -> Path:
    """Where the policies of a contender are kept until they have played."""
    return file.with_suffix(".pt")


def unfinished(file: Path) -> Path:
    """Where a training is saved until it is over."""
    return file.with_suffix(".unfinished")


class Training:
    """One contender in training.

    It is saved every five minutes, and goes on from there when it is made again. An `HTSCollector`
    goes on bit for bit. TorchRL's collectors can't be saved, so their games begin anew.

    Args:
        name: of `LABELS`.
        options: the recipe's.
        agent: what is trained.
        decay_frames: steps after which the learning rate would be 0.
        file: where the rows go, one for each batch. `policies` of it has those that are to play.

    Attributes:
        agent: what is trained.
    """

    def __init__(
        self, name: str, options: PPOOptions, agent: Agent, decay_frames: int, file: Path
    ) -> None:
        self._name, self._options, self.agent, self._file = name, options, agent, file
        self._collector = make_contender(name, options, agent)
        torch.set_num_threads(CORES)  # whatever making the collector set
        frames_per_batch = options.num_envs * options.sync_interval
        self._ppo = PPO(agent, options, -(-decay_frames // frames_per_batch))
        lag = options.lag if name.startswith("hts") else 0
        self._delayed = DelayedGradient(self._ppo.model, lag=lag, gradient_at=options.gradient_at)
        self._returns = EpisodeReturns()
        self._scores: deque[float] = deque(maxlen=WINDOW)
        self._rows: list[list[float]] = []
        self._kept: list[Kept] = []
        self._parts = {
            "model": self._ppo.model,
            "optimizer": self._ppo.optimizer,
            "schedule": self._ppo.schedule,
            "delayed": self._delayed,
        }
        if name.startswith("hts"):
            self._parts |= {"collector": self._collector, "returns": self._returns}
        if unfinished(file).exists():
            self._go_on()

    def run(self, evaluate_every: int, until: float) -> None:
        """Trains to the end.

        Args:
            evaluate_every: steps from one policy that is kept to play to the next; 0: none.
            until: the mean of a whole window at which it is over before all its steps are done.
        """
        elapsed_s, steps = self._rows[-1][:2] if self._rows else (0.0, 0)
        began = time.perf_counter() - elapsed_s
        shown = saved = elapsed_s
        try:
            for batch in self._collector:
                steps += batch.numel()
                mean = self.update(batch)
                elapsed_s = round(time.perf_counter() - began, 2)
                self._rows.append([elapsed_s, steps, len(self._scores), round(mean, 4)])
                if evaluate_every and steps // evaluate_every > len(self._kept):
                    self._kept.append(Kept.now(elapsed_s, steps, self.agent))
                if elapsed_s - shown > SHOW_EVERY_S:
                    shown = elapsed_s
                    print(
                        f"{self._name}: {steps:,} of {self._options.total_frames:,} steps, "
                        f"{steps / elapsed_s:.0f} a second, mean {mean:.2f}",
                        flush=True,
                    )
                if len(self._scores) == WINDOW and mean >= until:
                    break
                if steps >= self._options.total_frames:
                    break
                if elapsed_s - saved >= SAVE_EVERY_S:
                    saved = elapsed_s
                    self._save()
        finally:
            self._collector.shutdown()
        if evaluate_every and (not self._kept or self._kept[-1].steps < steps):
            self._kept.append(Kept.now(elapsed_s, steps, self.agent))
        self._finish()

    def update(self, batch: Any) -> float:
        """One update; returns the mean of the last episodes."""
        options = self._options
        self._scores += [score(options, value) for value in self._returns.update(batch)]
        if isinstance(options, ppo_atari.Options):
            batch["next", "reward"].sign_()
        with self._delayed:
            for _ in self._ppo.learn(batch):
                pass
        self._ppo.schedule.step()
        self._collector.update_policy_weights_()
        return fmean(self._scores) if self._scores else math.nan

    def _save(self) -> None:
        state = {
            "rows": self._rows,
            "scores": [*self._scores],
            "kept": [vars(each) for each in self._kept],
            "random": torch.get_rng_state(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }
        new = unfinished(self._file).with_suffix(".new")
        torch.save(state, new)
        os.replace(new, unfinished(self._file))

    def _go_on(self) -> None:
        state = torch.load(unfinished(self._file))
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        self._rows = state["rows"]
        self._scores += state["scores"]
        self._kept = [Kept(**each) for each in state["kept"]]
        torch.set_rng_state(state["random"])
        if "collector" not in self._parts:
            self._collector.update_policy_weights_()
        print(f"{self._name}: goes on after {self._rows[-1][1]:,} steps", flush=True)

    def _finish(self) -> None:
        """Leave the rows and the policies that are to play, each whole or not there."""
        if self._kept:
            torch.save([vars(each) for each in self._kept], policies(self._file))
        part = self._file.with_suffix(".part")
        with part.open("w", newline="") as rows:
            table = csv.writer(rows)
            table.writerow(COLUMNS)
            table.writerows(self._rows)
        part.rename(self._file)
        unfinished(self._file).unlink(missing_ok=True)
