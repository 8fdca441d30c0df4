"""The recipes as a user runs them: what they leave, and that a killed run goes on bit for bit."""

from __future__ import annotations

import csv
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes_path import RECIPES

pytest.importorskip("ale_py")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

CARTPOLE = (
    "ppo_cartpole.py --num-envs 4 --sync-interval 16 --minibatch-size 32 --epochs 1 "
    "--total-frames 16000 --log-interval 300 --eval-interval 1000 --eval-episodes 2"
)
PONG = (
    "ppo_atari.py --num-envs 2 --sync-interval 16 --minibatch-size 16 --epochs 1 "
    "--total-frames 800 --log-interval 64 --eval-interval 0"
)
BY_THE_CLOCK = re.compile(r"speed/|time/")


def start(arguments: str, *more: str) -> subprocess.Popen[str]:
    recipe, *flags = arguments.split()
    return subprocess.Popen(
        [sys.executable, str(RECIPES / recipe), *flags, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(arguments: str, *more: str, code: int = 0) -> str:
    """Run a recipe to its end; returns what it has printed."""
    process = start(arguments, *more)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == code, output
    return output


def rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file without what is measured by the clock."""
    with file.open() as lines:
        return [
            {name: value for name, value in row.items() if not BY_THE_CLOCK.match(name)}
            for row in csv.DictReader(lines)
        ]


def assert_equal_runs(one: Path, other: Path) -> None:
    """Bit for bit: the metrics, the evaluations, the parameters, and what training goes on from."""
    assert rows(one / "metrics.csv") == rows(other / "metrics.csv")
    assert rows(one / "evaluations.csv") == rows(other / "evaluations.csv")
    for name in ("policy.pt", "best.pt"):
        if (one / name).exists() or (other / name).exists():
            states = [torch.load(d / name) for d in (one, other)]
            weights = [state.get("policy", state) for state in states]
            assert weights[0].keys() == weights[1].keys()
            assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    last = [sorted((d / "checkpoints").iterdir())[-1].name for d in (one, other)]
    assert last[0] == last[1]


@pytest.mark.parametrize(
    ("arguments", "kills", "interval"),
    [(CARTPOLE, 20, ["--checkpoint-interval", "64"]), (PONG, 5, ["--checkpoint-interval", "32"])],
    ids=["cartpole", "pong"],
)
def test_i7_a_run_killed_at_any_moment_goes_on_bit_for_bit(
    tmp_path: Path, arguments: str, kills: int, interval: list[str]
) -> None:
    whole = tmp_path / "whole"
    run(arguments, "--output-dir", str(whole), "--checkpoint-interval", "0")
    moments = random.Random(0)
    survived, runs = 0, 0
    flags: list[str] = []
    while survived < kills or flags:
        killed = tmp_path / f"killed {runs}"
        process = start(arguments, *(flags or ["--output-dir", str(killed)]), *interval)
        for line in process.stdout:  # from when it trains on, any moment
            if "steps" in line:
                break
        try:
            process.communicate(timeout=None if survived == kills else moments.uniform(0, 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            survived += 1
            checkpoints = list((killed / "checkpoints").glob("step-*.pt"))
            flags = ["--resume", str(killed)] if checkpoints else []
            runs += not checkpoints
        else:
            assert process.returncode == 0
            assert_equal_runs(whole, killed)
            flags = []
            runs += 1
    assert runs
