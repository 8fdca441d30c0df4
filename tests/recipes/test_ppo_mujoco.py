"""recipes/ppo_mujoco.py, on Pendulum, which needs no MuJoCo, and resumed on Hopper, which does."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from recipe_runs import assert_equal_runs, run

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("nothing_left")

PENDULUM = "ppo_mujoco.py --env-id Pendulum-v1 --num-envs 4 --sync-interval 16 --minibatch-size 32"
PENDULUM += " --epochs 1 --hidden-units 8 --total-frames 128 --eval-interval 64 --eval-episodes 1"


def test_statistics_are_in_the_checkpoints_and_in_what_is_evaluated(tmp_path: Path) -> None:
    run(PENDULUM, "--output-dir", str(tmp_path))
    state = torch.load(max((tmp_path / "checkpoints").iterdir()))["parts"]
    policy, best = torch.load(tmp_path / "policy.pt"), torch.load(tmp_path / "best.pt")
    (count,) = (name for name in policy if name.endswith(".count"))
    assert policy[count] == state["rewards"]["count"] == 128
    assert best["policy"][count] == best["step"]
    assert state["rewards"]["returns"].shape == (4,)


def test_i7_mujoco_is_resumed_in_the_middle_of_its_episodes(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = f"{PENDULUM.replace('Pendulum-v1', 'Hopper-v5')} --log-interval 64"
    flags += " --checkpoint-interval 64 --keep-checkpoints 3"
    run(flags, "--output-dir", str(whole))
    shutil.copytree(whole, resumed)
    _, *later = sorted((resumed / "checkpoints").iterdir())
    assert later
    for path in later:
        path.unlink()
    assert "64 of 128 steps are done" in run("ppo_mujoco.py --resume", str(resumed))
    assert_equal_runs(whole, resumed)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        (
            "CartPole-v1",
            "those of CartPole-v1 are Discrete(2): ppo_cartpole.py plays Discrete ones",
        ),
        ("HalfCheeta-v5", "Did you mean: `HalfCheetah`?"),
        ("HalfCheetah-v3", "HalfCheetah-v3 can't be made: The mujoco v2 and v3 based"),
        ("HalfCheetah-v5", "MuJoCo is not installed: pip install 'torchrl_hts[mujoco]'"),
    ],
)
def test_a_task_that_cannot_be_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env_id: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)  # as if it were not installed
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    directory = tmp_path / "run"
    output = run("ppo_mujoco.py --env-id", env_id, "--output-dir", str(directory), code=1)
    assert output.startswith("error: ")
    assert message in output
    assert not directory.exists()
