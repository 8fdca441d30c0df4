"""Returns by what normalises observations and rewards: one PPO, four ways, several seeds.

    python benchmarks/normalisation.py --output-dir runs/normalisation

`policy` are `RunningNorm` in both networks and `RunningRewardNorm` in the learner, as in
recipes/ppo_mujoco.py. `gymnasium` are its wrappers around each environment: `NormalizeObservation`
and `NormalizeReward`, each clipped to 10. `VecNormV2` is TorchRL's transform around each
environment, of the observation alone, as in TorchRL's own PPO for MuJoCo. `VecNormV2-rewards` is
that with `RunningRewardNorm` in the learner. All else is the same: that recipe's networks, loss and
settings, with lag 1.

Each run writes TASK-WAY-SEED.csv; those that are there are not run again, and must be as long as
--total-frames says. Draws normalisation.svg
and prints a table: the mean return of the last 100 episodes of each run, as the task pays them,
and mean and standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from _ppo_learners import control_learner
from gymnasium import wrappers
from matplotlib.figure import Figure
from support.continuous import make_continuous
from torchrl.envs import Compose, DoubleToFloat, GymWrapper, TransformedEnv, VecNormV2

from torchrl_hts import EpisodeReturns, HTSCollector, World
from torchrl_hts.bench.command_line import count, make_directory

ENVS, ALPHA, GAMMA = 8, 256, 0.99
BOUND = 10.0  # of what the wrappers normalise
RETURN = ("episode", "r")  # in the info of an episode's last step
COLUMNS = ["steps", "return_mean"]


def by_gymnasium(env_id: str) -> gym.Env[Any, Any]:
    """Normalised by wrappers, around one that counts the rewards as they are paid."""
    env = wrappers.NormalizeObservation(wrappers.RecordEpisodeStatistics(make_continuous(env_id)))
    clipped = wrappers.TransformObservation(
        env, lambda observed: np.clip(observed, -BOUND, BOUND), env.observation_space
    )
    rewarded = wrappers.NormalizeReward(clipped, gamma=GAMMA)
    return wrappers.TransformReward(rewarded, lambda paid: float(np.clip(paid, -BOUND, BOUND)))


def by_torchrl(env_id: str) -> TransformedEnv:
    """Observations normalised by a transform."""
    env = GymWrapper(make_continuous(env_id))
    transforms: list[Any] = [VecNormV2(in_keys=["observation"])]
    if env.observation_spec["observation"].dtype == torch.float64:
        transforms.insert(0, DoubleToFloat(in_keys=["observation"]))
    return TransformedEnv(env, Compose(*transforms))


WAYS: dict[str, Callable[[str], Any]] = {
    "policy": make_continuous,
    "gymnasium": by_gymnasium,
    "VecNormV2": by_torchrl,
    "VecNormV2-rewards": by_torchrl,
}


def rounds_of(total_frames: int) -> int:
    """How many batches a run takes."""
    return -(-total_frames // (ENVS * ALPHA))


def train(env_id: str, way: str, seed: int, total_frames: int, file: Path) -> None:
    """One run."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rounds = rounds_of(total_frames)
    info_keys = [RETURN] if way == "gymnasium" else []
    returns = EpisodeReturns(info_keys=info_keys)
    curve = []
    with World(threads=1) as world:
        learner = control_learner(
            env_id,
            world,
            normalises_observations=way == "policy",
            normalises_rewards=way in ("policy", "VecNormV2-rewards"),
            lag=1,
            rounds=rounds,
            seed=seed,
        )
        with HTSCollector(
            [partial(WAYS[way], env_id)] * ENVS,
            learner.policy,
            frames_per_batch=ENVS * ALPHA,
            total_frames=rounds * ENVS * ALPHA,
            lag=1,
            seed=seed,
            info_keys=info_keys,
        ) as collector:
            for number, batch in enumerate(collector, 1):
                returns.update(batch)
                learner.learn(batch)
                collector.update_policy_weights_()
                mean = returns.info_means[RETURN] if info_keys else returns.mean
                curve.append([number * ENVS * ALPHA, mean])
                said = f"{file.stem}: {curve[-1][0]:,} steps, {mean:,.1f}"
                print(said, file=sys.stderr, flush=True)
    unfinished = file.with_suffix(".part")
    with unfinished.open("w", newline="") as stream:
        csv.writer(stream).writerows([COLUMNS, *curve])
    unfinished.replace(file)


def read(file: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A run's steps and mean returns, ``[2, rounds]``."""
    return np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2).T


def check_lengths(files: Iterable[Path], total_frames: int) -> None:
    """Tell of a run that is there and is not as long as those to come; all else is in its name.

    Raises:
        SystemExit: then.
    """
    expected = rounds_of(total_frames) * ENVS * ALPHA
    for file in files:
        if file.exists() and (steps := int(read(file)[0, -1])) != expected:
            raise SystemExit(
                f"error: {file} is of {steps} steps, and --total-frames {total_frames} makes "
                f"{expected}: give another --output-dir"
            )


def draw(tasks: Sequence[str], seeds: Sequence[int], directory: Path) -> None:
    """Mean return over steps: each run, and the mean over seeds."""
    figure = Figure(figsize=(5 * len(tasks), 4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for index, way in enumerate(WAYS):
            runs = np.stack([read(directory / f"{task}-{way}-{seed}.csv") for seed in seeds])
            for steps, means in runs:
                axes.plot(steps, means, color=f"C{index}", alpha=0.3, linewidth=1)
            axes.plot(runs[0, 0], runs[:, 1].mean(0), color=f"C{index}", label=way)
        axes.set(title=task, xlabel="environment steps", ylabel="mean of the last 100 episodes")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(directory / "normalisation.svg")


def main() -> None:
    """Run what isn't there yet, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--env-ids", nargs="+", default=["Pendulum-v1", "HalfCheetah-v5"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--total-frames", type=count, default=100_000, help="of a run (100000)")
    given = parser.parse_args()
    directory = given.output_dir
    make_directory(directory)
    runs = {
        (task, way, seed): directory / f"{task}-{way}-{seed}.csv"
        for seed, task, way in product(given.seeds, given.env_ids, WAYS)
    }
    check_lengths(runs.values(), given.total_frames)
    for run, file in runs.items():
        if not file.exists():
            train(*run, given.total_frames, file)
    print("| task | normalised by | each seed | mean | standard deviation |")
    print("| --- | --- | --- | --- | --- |")
    for task in given.env_ids:
        for way in WAYS:
            ends = [read(runs[task, way, seed])[1, -1] for seed in given.seeds]
            each = ", ".join(f"{end:,.0f}" for end in ends)
            spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
            print(f"| {task} | {way} | {each} | {statistics.mean(ends):,.0f} | {spread:,.0f} |")
    draw(given.env_ids, given.seeds, directory)


if __name__ == "__main__":
    main()
