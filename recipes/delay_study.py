"""Which update suits which algorithm, as lag grows: A2C and PPO on six small environments.

Each cell of {environment} x {algorithm} x {variant} x {learning rate} x {seed} is one training run
with HTSCollector and DelayedGradient. It leaves one JSON file, and cells that are there already are
skipped, so a study can be stopped at any time, and gone on with by the same command.

    python recipes/delay_study.py --envs cartpole acrobot --jobs 2
    python recipes/delay_study.py --plot

The second draws return against steps for all cells that are there, one picture per algorithm, and
prints their final returns as a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from support.classic import TASKS, Settings
from support.errors import ONCE_MORE, RecipeError, exit_with
from support.start import announce, parse_or_exit
from support.study import VARIANTS, draw, load, parse, read_cell, table

if __name__ == "__main__":  # before torch is imported, which takes seconds
    GIVEN = parse_or_exit(lambda: parse(__doc__))
    announce("importing torch and torchrl")

import gymnasium as gym
import torch
from support.checkpoints import write_atomically
from support.layers import orthogonal
from support.pixels import Agent
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss, LossModule
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, EpisodeReturns, HTSCollector, keep_servers

NUM_POINTS = 50  # of a learning curve, each the mean over the episodes that ended in its steps
FINAL_SHARE = 0.1  # of the steps, at the end, that the final return is the mean of


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        multiplier: of the learning rate.
        total_frames: None is the environment's own number.
    """

    env: str
    algorithm: str
    variant: str
    multiplier: float
    seed: int
    total_frames: int | None = None

    @property
    def name(self) -> str:
        return f"{self.env}-{self.algorithm}-{self.variant}-x{self.multiplier:g}-seed{self.seed}"

    @property
    def settings(self) -> Settings:
        own = TASKS[self.env].settings[self.algorithm]
        return replace(own, learning_rate=own.learning_rate * self.multiplier)

    @property
    def num_rounds(self) -> int:
        frames_per_batch = self.settings.num_envs * self.settings.sync_interval
        return -(-(self.total_frames or TASKS[self.env].total_frames) // frames_per_batch)

    def description(self) -> dict[str, Any]:
        """All that the cell's curve depends on."""
        return {
            **asdict(self),
            **asdict(self.settings),
            "total_frames": self.num_rounds * self.settings.num_envs * self.settings.sync_interval,
        }


class Pixels(nn.Module):
    """Planes of MinAtar, ``[..., 10, 10, C]`` bool, to float features ``[..., 128]``."""

    WIDTH = 128

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 8 * 8, self.WIDTH),
            nn.ReLU(),
        )

    def forward(self, planes: Tensor) -> Tensor:
        flat = planes.flatten(0, -4).movedim(-1, -3).float()
        return self.layers(flat).unflatten(0, planes.shape[:-3])


def initialise(layers: nn.Module, last: nn.Module | None = None, last_gain: float = 1.0) -> None:
    """Orthogonal weights, with a gain of their own in the last layer; biases 0."""
    for layer in layers.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            orthogonal(layer, last_gain if layer is last else 2**0.5)


@dataclass(frozen=True)
class Networks:
    """What is trained.

    Attributes:
        policy: observations to actions; what the collector runs.
        actor, critic: what the loss module takes. Where there is a shared trunk, they read its
            features.
        trunk: writes these features; None if there is none.
    """

    policy: TensorDictModuleBase
    actor: TensorDictModuleBase
    critic: TensorDictModuleBase
    trunk: TensorDictModule | None = None

    @property
    def value(self) -> TensorDictModuleBase:
        """Observations to values."""
        return self.critic if self.trunk is None else TensorDictSequential(self.trunk, self.critic)


def make_networks(env: gym.Env, *, shared_trunk: bool) -> Networks:
    """A policy and a value function, orthogonally initialised."""
    shape = env.observation_space.shape
    if shared_trunk:
        trunk = Pixels(shape[-1])
        initialise(trunk)
        agent = Agent(env, trunk, Pixels.WIDTH)
        return Networks(agent.policy, agent.actor_head, agent.critic_head, agent.trunk)

    def network(outputs: int, output_gain: float) -> nn.Sequential:
        if len(shape) == 3:
            layers = nn.Sequential(Pixels(shape[-1]), nn.Linear(Pixels.WIDTH, outputs))
        else:
            layers = nn.Sequential(
                nn.Linear(shape[0], 64),
                nn.Tanh(),
                nn.Linear(64, 64),
                nn.Tanh(),
                nn.Linear(64, outputs),
            )
        initialise(layers, layers[-1], output_gain)
        return layers

    actor = ProbabilisticActor(
        TensorDictModule(network(int(env.action_space.n), 0.01), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return Networks(actor, actor, ValueOperator(network(1, 1.0), in_keys=["observation"]))


def make_loss(cell: Cell, networks: Networks) -> LossModule:
    """The algorithm's loss, as TorchRL has it."""
    common = {
        "entropy_coeff": cell.settings.entropy_coefficient,
        "critic_coeff": 0.5,
        "loss_critic_type": "l2",
    }
    if cell.algorithm == "ppo":
        return ClipPPOLoss(
            networks.actor,
            networks.critic,
            clip_epsilon=0.2,
            normalize_advantage=True,
            **common,
        )
    return A2CLoss(networks.actor, networks.critic, **common)


def make_optimizer(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    """The algorithm's optimizer, as torch has it."""
    learning_rate = cell.settings.learning_rate
    if cell.algorithm == "ppo":
        return torch.optim.Adam(model.parameters(), learning_rate, eps=1e-5)
    return torch.optim.RMSprop(model.parameters(), learning_rate, alpha=0.99, eps=1e-5)


def train(cell: Cell) -> list[tuple[int, float]]:
    """Trains a cell; returns each episode's return, with the steps done by the end of its round."""
    torch.manual_seed(cell.seed)
    torch.set_num_threads(1)
    settings, variant = cell.settings, VARIANTS[cell.variant]
    task = TASKS[cell.env]
    networks = make_networks(task.make_env(), shared_trunk=task.shared_trunk)
    advantage = GAE(gamma=settings.gamma, lmbda=settings.gae_lambda, value_network=networks.value)
    loss_module = make_loss(cell, networks)
    model = nn.ModuleList([loss_module, *filter(None, [networks.trunk])])
    optimizer = make_optimizer(cell, model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=cell.num_rounds)
    delayed = DelayedGradient(
        model if variant.critic_delayed else networks.policy,
        lag=variant.lag,
        gradient_at=variant.gradient_at,
    )
    frames_per_batch = settings.num_envs * settings.sync_interval
    returns, episodes, frames = EpisodeReturns(), [], 0

    with HTSCollector(
        [task.make_env] * settings.num_envs,
        networks.policy,
        frames_per_batch=frames_per_batch,
        total_frames=cell.num_rounds * frames_per_batch,
        num_executors=1,
        num_actors=1,
        lag=variant.lag,
        seed=cell.seed,
    ) as collector:
        for batch in collector:
            frames += frames_per_batch
            episodes += [(frames, value) for value in returns.update(batch)]
            with delayed(batch):
                with torch.no_grad():
                    advantage(batch)
                steps = batch.reshape(-1)
                for _ in range(settings.epochs):
                    for indices in torch.randperm(len(steps)).chunk(settings.minibatches):
                        rows = steps[indices]
                        if networks.trunk is not None:
                            networks.trunk(rows)
                        losses = loss_module(rows)
                        loss = sum(v for name, v in losses.items() if name.startswith("loss_"))
                        loss.backward()
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                        optimizer.step()
                        optimizer.zero_grad()
            schedule.step()
            collector.update_policy_weights_()
    return episodes


# Cells: each trained once, and its curve kept in a file.


def run_cells(cells: Sequence[Cell], directory: Path) -> None:
    """Trains cells one after the other, and leaves each one's curve in ``directory/NAME.json``."""
    with keep_servers():
        for cell in cells:
            began = time.monotonic()
            result = {**cell.description(), **learning_curve(cell, train(cell))}
            seconds = time.monotonic() - began
            content = json.dumps({**result, "seconds": round(seconds, 1)})
            write_atomically(directory / f"{cell.name}.json", content.encode())
            print(f"{cell.name}: {result['final_return']} at the end, {seconds:.0f} s", flush=True)


def learning_curve(cell: Cell, episodes: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """The means of returns over equal parts of the steps; None where no episode ended."""
    frames = cell.description()["total_frames"]
    parts: list[list[float]] = [[] for _ in range(NUM_POINTS)]
    for step, value in episodes:
        parts[(step * NUM_POINTS - 1) // frames].append(value)
    final = [value for step, value in episodes if step > (1 - FINAL_SHARE) * frames]
    return {
        "steps": [round(frames * (i + 1) / NUM_POINTS) for i in range(NUM_POINTS)],
        "returns": [round(fmean(part), 3) if part else None for part in parts],
        "final_return": round(fmean(final), 3) if final else None,
    }


def is_done(cell: Cell, directory: Path) -> bool:
    """Whether a cell's file is there.

    Raises:
        RecipeError: if it is there, but damaged or of other settings.
    """
    file = directory / f"{cell.name}.json"
    if not file.exists():
        return False
    found = read_cell(file)
    changed = [
        f"{name} was {found.get(name)} and is {value}"
        for name, value in cell.description().items()
        if found.get(name) != value
    ]
    if changed:
        raise RecipeError(
            f"{file} is of other settings: {'; '.join(changed)}; delete it, or give another "
            "--output-dir"
        )
    return True


def main(given: argparse.Namespace) -> int:
    """Runs the cells that are missing, or draws those that are there; returns the exit code."""
    directory: Path = given.output_dir
    if not given.plot:
        directory.mkdir(parents=True, exist_ok=True)
        cells = [
            Cell(env, algorithm, variant, multiplier, seed, given.total_frames)
            for seed, env, multiplier, algorithm, variant in itertools.product(
                given.seeds, given.envs, given.learning_rates, given.algorithms, given.variants
            )
        ]
        missing = [cell for cell in cells if not is_done(cell, directory)]
        print(f"{len(missing)} of {len(cells)} cells to run", flush=True)
        if given.jobs == 1:
            run_cells(missing, directory)
        elif missing:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(given.jobs, spawn) as pool:
                shares = [missing[job :: given.jobs] for job in range(given.jobs)]
                for _ in pool.map(run_cells, shares, itertools.repeat(directory)):
                    pass
    results = load(directory)
    for algorithm, panels in results.items():
        draw(algorithm, panels, directory / f"{algorithm}.svg")
    print(table(results))
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(GIVEN), ONCE_MORE)
