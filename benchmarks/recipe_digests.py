"""Whether the number of learners changes what a recipe trains, at the size that its users have.

    python benchmarks/recipe_digests.py
    python benchmarks/recipe_digests.py --runs breakout-ppo --learners 1 2

torchrun starts each recipe with one learner, and with others, twice for each number: with one
executor and one actor a learner, and with two of each. A row has the first digits of the digest of
the final policy, and of the columns of metrics.csv that no clock has written. Within a run all must
have the same. Football is played by EnvPool, or with --engine gfootball by that.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _machine import commit, machine
from _recipes import RECIPES, environment

from torchrl_hts.bench.command_line import count
from torchrl_hts.testing import digest

SHARDS = 4
A2C = "--num-envs 16 --total-frames 1600 --log-interval 80"
PPO = "--num-envs 8 --sync-interval 32 --minibatch-size 64 --total-frames 1024 --log-interval 256"
RUNS = {
    "pong-a2c": f"a2c_atari.py --env-id ALE/Pong-v5 {A2C}",
    "pong-ppo": f"ppo_atari.py --env-id ALE/Pong-v5 {PPO}",
    "breakout-a2c": f"a2c_atari.py --env-id ALE/Breakout-v5 {A2C}",
    "breakout-ppo": f"ppo_atari.py --env-id ALE/Breakout-v5 {PPO}",
    "football-ppo": f"ppo_football.py --scenario academy_empty_goal_close {PPO}",
}
BY_THE_CLOCK = ("speed/", "time/")
DIGITS = 16


def train(recipe: str, size: int, workers: int, directory: Path) -> tuple[str, str]:
    """What so many learners make of a recipe: digests of the policy, and of the metrics."""
    name, *flags = shlex.split(recipe)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), str(RECIPES / name), *flags]
    command += ["--shards", str(SHARDS), "--eval-interval", "0", "--output-dir", str(directory)]
    command += ["--num-executors", str(workers), "--num-actors", str(workers)]
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    if ended.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{ended.stdout[-3000:]}")
    with (directory / "metrics.csv").open() as file:
        rows = [
            [(name, row[name]) for name in sorted(row) if not name.startswith(BY_THE_CLOCK)]
            for row in csv.DictReader(file)
        ]
    metrics = hashlib.sha256(repr(rows).encode()).hexdigest()
    return digest(torch.load(directory / "policy.pt").values())[:DIGITS], metrics[:DIGITS]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--learners", type=count, nargs="+", default=[1, 2, 4])
    parser.add_argument("--engine", choices=("gfootball", "envpool"), default="envpool")
    options = parser.parse_args()
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, torch {here['torch']}, commit {commit()}\n")
    print("| run | learners | executors and actors of each | policy | metrics | s |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    same = True
    for name in options.runs:
        recipe = RUNS[name]
        if name.startswith("football"):
            recipe += f" --engine {options.engine}"
        found = set()
        for size in options.learners:
            for workers in (1, 2):
                began = time.monotonic()
                with tempfile.TemporaryDirectory() as parent:
                    digests = train(recipe, size, workers, Path(parent, "run"))
                took_s = time.monotonic() - began
                row = [name, str(size), str(workers), *digests, f"{took_s:.0f}"]
                print("|", " | ".join(row), "|", flush=True)
                found.add(digests)
        same = same and len(found) == 1
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
