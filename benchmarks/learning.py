"""Return against wall-clock: one PPO, through HTSCollector and through TorchRL's own collectors.

    python benchmarks/learning.py --env-id ALE/Pong-v5 --total-frames 600000
    python benchmarks/learning.py --contenders hts multi-sync --output-dir runs/learning

Each contender trains the agent of recipes/ppo_atari.py with the update and the settings of that
recipe, on the same games, for the same number of steps, one after the other: run it on a machine
that does nothing else. `multi-sync` is MultiSyncCollector with a worker per core, among which the
games are shared out; `parallel` is Collector with ParallelEnv, a process per game. The learner has
as many threads as there are cores, in each of them.

Writes CONTENDER-seedSEED.csv as it goes, and learning.svg: mean return of the last 100 episodes
against minutes and against steps. Contenders whose file is whole are not run again.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _contenders import serial, wrap
from _workloads import CORES
from matplotlib.figure import Figure
from ppo_atari import Options
from support.atari import train_env
from support.pixels import Agent, make_collector
from support.ppo import PPO
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import ParallelEnv

from torchrl_hts import DelayedGradient, EpisodeReturns

LABELS = {
    "hts": "HTSCollector, lag 1",
    "hts-lag0": "HTSCollector, lag 0",
    "multi-sync": "MultiSyncCollector",
    "parallel": "Collector with ParallelEnv",
}
COLUMNS = ["elapsed_s", "steps", "return_mean"]


def make_contender(name: str, options: Options, agent: Agent) -> Any:
    """A collector of ``[num_envs, sync_interval]`` batches with the actors' values in them."""
    if name.startswith("hts"):
        return make_collector(options, train_env(options), agent.actor_critic)
    factories = [train_env(options)] * options.num_envs
    frames_per_batch = options.num_envs * options.sync_interval
    sizes = {
        "frames_per_batch": frames_per_batch,
        "total_frames": frames_per_batch * rounds(options),
    }
    if name == "parallel":
        env = ParallelEnv(options.num_envs, [partial(wrap, factory) for factory in factories])
        return Collector(env, agent.actor_critic, **sizes)
    workers = min(CORES, options.num_envs)
    shares = [partial(serial, factories[worker::workers]) for worker in range(workers)]
    return MultiSyncCollector(shares, agent.actor_critic, **sizes, cat_results=0)


def rounds(options: Options) -> int:
    """How many batches a run takes."""
    return -(-options.total_frames // (options.num_envs * options.sync_interval))


def train(name: str, options: Options, file: Path) -> None:
    """Trains one contender, and leaves a row for each batch."""
    torch.manual_seed(options.seed)
    agent = Agent(train_env(options)())
    collector = make_contender(name, options, agent)
    torch.set_num_threads(CORES)  # whatever making the collector set
    ppo = PPO(agent, options, rounds(options))
    lag = options.lag if name.startswith("hts") else 0
    delayed = DelayedGradient(ppo.model, lag=lag, gradient_at=options.gradient_at)
    returns, steps = EpisodeReturns(), 0
    unfinished = file.with_suffix(".part")
    try:
        with unfinished.open("w", newline="") as rows:
            table = csv.writer(rows)
            table.writerow(COLUMNS)
            began = shown = time.perf_counter()
            for batch in collector:
                steps += batch.numel()
                returns.update(batch)
                batch["next", "reward"].sign_()
                with delayed:
                    for _ in ppo.learn(batch):
                        pass
                ppo.schedule.step()
                collector.update_policy_weights_()
                now = time.perf_counter()
                table.writerow([round(now - began, 2), steps, round(returns.mean, 4)])
                if now - shown > 30:
                    shown = now
                    print(
                        f"{name}: {steps:,} of {options.total_frames:,} steps, "
                        f"{steps / (now - began):.0f} a second, return {returns.mean:.1f}",
                        flush=True,
                    )
                    rows.flush()
    finally:
        collector.shutdown()
    unfinished.rename(file)


Curve = dict[str, list[float]]


def read(file: Path) -> Curve:
    """A contender's columns."""
    with file.open(newline="") as rows:
        table = list(csv.DictReader(rows))
    return {column: [float(row[column]) for row in table] for column in COLUMNS}


def draw(title: str, curves: dict[str, Curve], file: Path) -> None:
    """Return against minutes, and against steps."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        minutes = [seconds / 60 for seconds in curve["elapsed_s"]]
        left.plot(minutes, curve["return_mean"], label=LABELS[name])
        right.plot(curve["steps"], curve["return_mean"], label=LABELS[name])
    left.set(xlabel="minutes", ylabel="return, mean of the last 100 episodes")
    right.set(xlabel="environment steps")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=120)


def print_table(curves: dict[str, Curve]) -> None:
    """Minutes and final return of each contender, in Markdown."""
    print("| collector | minutes | steps/s | return at the end | after as long as the first took |")
    print("| --- | --- | --- | --- | --- |")
    limit_s = next(iter(curves.values()))["elapsed_s"][-1]
    for name, curve in curves.items():
        seconds, steps, returns = (curve[column] for column in COLUMNS)
        within = [value for at, value in zip(seconds, returns, strict=True) if at <= limit_s]
        print(
            f"| {LABELS[name]} | {seconds[-1] / 60:.1f} | {steps[-1] / seconds[-1]:.0f} | "
            f"{returns[-1]:.1f} | {within[-1]:.1f} |"
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Options()
    parser.add_argument("--env-id", default=defaults.env_id, help="id of ale-py")
    parser.add_argument("--total-frames", type=int, default=600_000, help="steps of each run")
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--num-envs", type=int, default=defaults.num_envs)
    parser.add_argument("--sync-interval", type=int, default=defaults.sync_interval)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=[*LABELS],
        default=["hts", "multi-sync", "parallel"],
        help=f"of {', '.join(LABELS)}",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/learning"))
    parser.add_argument("--alone", choices=[*LABELS], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the contenders that are missing, each in a process of its own, and draws them all."""
    given = parse()
    options = Options(
        env_id=given.env_id,
        total_frames=given.total_frames,
        learning_rate=given.learning_rate,
        num_envs=given.num_envs,
        sync_interval=given.sync_interval,
        seed=given.seed,
        lag=0 if given.alone == "hts-lag0" else 1,
    )
    directory: Path = given.output_dir
    directory.mkdir(parents=True, exist_ok=True)
    files = {name: directory / f"{name}-seed{given.seed}.csv" for name in given.contenders}
    if given.alone is not None:
        train(given.alone, options, directory / f"{given.alone}-seed{given.seed}.csv")
        # TorchRL's multi-process collectors may keep a process that is done from ending.
        sys.stdout.flush()
        os._exit(0)
    for name, file in files.items():
        if not file.exists():
            command = [sys.executable, __file__, *sys.argv[1:], "--alone", name]
            if code := subprocess.run(command, check=False).returncode:
                print(f"error: {name} ended with exit code {code}", file=sys.stderr)
                return 1
    curves = {name: read(file) for name, file in files.items()}
    title = f"PPO on {given.env_id}, {given.num_envs} games, {CORES} cores"
    draw(title, curves, directory / "learning.svg")
    print_table(curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
