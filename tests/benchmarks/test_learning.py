"""Learning curves are drawn of runs that are whole, and policies that were kept play."""

from __future__ import annotations

import math
import subprocess
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from scripts import run_script

pytest.importorskip("ale_py")
pytest.importorskip("matplotlib")
import _curves
import _training
import learning
from support.pixel_options import PPOOptions
from support.pixels import Agent
from torchrl.envs import SerialEnv

from torchrl_hts.testing import digest

pytestmark = pytest.mark.usefixtures("warm_servers")


def test_learning_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each contender has a process of its own, which is this one here."""

    run_elsewhere = subprocess.run

    def run_here(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "--alone" not in command:
            return run_elsewhere(command, **options)
        given = learning.parse(command[2:])
        file = tmp_path / f"{given.alone}-seed{given.seeds[0]}.csv"
        learning.run(given, learning.options_of(given), file)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run_here)
    known = "elapsed_s,steps,episodes,return_mean\n60.0,32,99,-19.0\n120.0,64,100,-19.5\n"
    (tmp_path / "hts-seed0.csv").write_text(known)
    flags = "--contenders hts multi-sync --num-envs 1 --sync-interval 16 --total-frames 32"
    flags += " --reach -20 18 --decay-frames 640"
    printed, _ = run_script("learning.py", *flags.split(), "--output-dir", str(tmp_path))
    assert "| HTSCollector, lag 1 | 2.0 | 1 | -19.50 | -19.50 | 2.0 (64) | never |" in printed
    assert (tmp_path / "hts-seed0.csv").read_text() == known
    rows = (tmp_path / "multi-sync-seed0.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["steps", "16", "32"]
    assert "</svg>" in (tmp_path / "learning.svg").read_text()
    others = [*flags.split(), "--total-frames", "48", "--output-dir", str(tmp_path)]
    said = f"error: {tmp_path / 'multi-sync-seed0.csv'} is of a run with total_frames 32, and this "
    said += "would be with total_frames 48: give another --output-dir"
    told = run_script("learning.py", *others, code=said)[1]
    assert told == f"{tmp_path / 'hts-seed0.csv'} is taken as it is: nobody noted its settings\n"


def test_a_table_over_seeds(tmp_path: Path) -> None:
    head = "elapsed_s,steps,episodes,return_mean\n"
    for seed, rows in enumerate(["60,32,100,1\n120,64,100,2", "240,64,100,4"]):
        (tmp_path / f"hts-seed{seed}.csv").write_text(head + rows)
    flags = ["--contenders", "hts", "--output-dir", str(tmp_path), "--seeds", "0", "1"]
    printed, _ = run_script("learning.py", *flags, "--reach", "2", "3", "9")
    cells = ["HTSCollector, lag 1", "3.0 ± 1.4", "0 ± 0", "3.00 ± 1.41", "3.00 ± 1.41"]
    cells += ["3.0 ± 1.4 (64 ± 0)", "4.0 (64), 1 of 2 seeds", "never"]
    assert f"| {' | '.join(cells)} |" in printed
    assert "</svg>" in (tmp_path / "learning.svg").read_text()


class PaidEnv(gym.Env[Any, Any]):
    """Five steps, each rewarded with the action."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.zeros(2, np.float32), float(action), self.t == 5, False, {}


def test_learning_lets_the_policies_play_that_it_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(PaidEnv(), torch.nn.Identity(), 2)

    def preferring(action: int) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            agent.logits.module.bias.copy_(torch.eye(2)[action])
        return {key: value.clone() for key, value in agent.policy.state_dict().items()}

    kept = [(90.0, 32, preferring(0)), (180.0, 64, preferring(1))]
    monkeypatch.setattr(learning, "evaluated_game_of", lambda options: PaidEnv)
    file = tmp_path / "hts-seed0.csv"
    torch.save([vars(_training.Kept(*each)) for each in kept], _training.policies(file))
    learning.evaluate(PPOOptions(), agent, file)
    curve = _curves.read(learning.evaluated(file))
    assert curve["steps"] == [32, 64]
    assert curve["return_mean"] == [0, 5]
    assert [*tmp_path.iterdir()] == [learning.evaluated(file)]


@pytest.fixture
def paid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a training of 20 episodes a batch."""
    monkeypatch.setattr(_training, "game_of", lambda options: PaidEnv)
    monkeypatch.setattr(_training, "ParallelEnv", SerialEnv)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # of the other tests

    def make(name: str, file: Path) -> _training.Training:
        torch.manual_seed(0)
        options = PPOOptions(num_envs=2, sync_interval=50, minibatch_size=50, total_frames=800)
        agent = Agent(PaidEnv(), torch.nn.Identity(), 2)
        return _training.Training(name, options, agent, 2_000, file)

    return make


def test_learning_stops_at_the_goal_and_keeps_the_policy_that_reached_it(
    tmp_path: Path, paid: Any
) -> None:
    file = tmp_path / "hts-seed0.csv"
    training = paid("hts", file)
    training.run(300, 0.0)
    curve = _curves.read(file)
    assert curve["episodes"][-2:] == [80, 100], "a mean of fewer is none"
    assert curve["steps"][-1] == 500
    kept = torch.load(_training.policies(file))
    assert [each["steps"] for each in kept] == [300, 500]
    newest = training.agent.policy.state_dict()
    assert all((kept[-1]["values"][key] == value).all() for key, value in newest.items())
    assert any((kept[0]["values"][key] != value).any() for key, value in newest.items())


@pytest.mark.parametrize("name", ["hts", "parallel"])
def test_a_training_that_is_stopped_goes_on(
    name: str, tmp_path: Path, paid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole.csv", tmp_path / "stopped.csv"
    paid(name, whole).run(200, math.inf)

    training = paid(name, stopped)
    monkeypatch.setattr(_training, "SAVE_EVERY_S", 0.0)
    update, updates = training.update, count(1)

    def stop(batch: Any) -> float:
        if next(updates) == 5:
            raise KeyboardInterrupt
        return update(batch)

    monkeypatch.setattr(training, "update", stop)
    with pytest.raises(KeyboardInterrupt):
        training.run(200, math.inf)
    assert not stopped.exists()
    paid(name, stopped).run(200, math.inf)

    found, expected = _curves.read(stopped), _curves.read(whole)
    assert found["steps"] == expected["steps"] == [100 * done for done in range(1, 9)]
    assert found["elapsed_s"] == sorted(found["elapsed_s"])
    if name == "hts":
        assert found["return_mean"] == expected["return_mean"]
        assert _training_values(stopped) == _training_values(whole)
    assert [each["steps"] for each in torch.load(_training.policies(stopped))] == [
        200,
        400,
        600,
        800,
    ]
    assert not _training.unfinished(stopped).exists()


def _training_values(file: Path) -> list[str]:
    return [digest(each["values"].values()) for each in torch.load(_training.policies(file))]
