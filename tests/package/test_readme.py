"""What the README and the tutorials show runs as it is shown."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from processes import wait_until
from script_paths import QUICK_START

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TUTORIALS = ROOT / "docs" / "tutorials"

MASKING_ENV = """
import gymnasium as gym
import numpy as np


class MyEnv(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._seen()

    def step(self, action):
        assert action == self.t % 2
        self.t += 1
        observation, info = self._seen()
        return observation, 1.0, self.t == 5, False, info

    def _seen(self):
        mask = np.arange(2) == self.t % 2
        return np.full(4, self.t, np.float32), {"action_mask": mask.astype(np.int8)}


"""
CARRIED = "\nassert 'critic_state' in batch.keys()\n"


def test_the_loop_runs_from_a_file_of_its_own(tmp_path: Path) -> None:
    """With fewer frames."""
    code = re.search(r"## Quick start\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    short, replaced = re.subn(r"total_frames=[\d_]+", "total_frames=6_400", code[1])
    assert replaced == 1
    script = tmp_path / "loop.py"
    script.write_text(short)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    printed = re.fullmatch(r"mean return of the last 100 episodes: (\d+)\n", done.stdout)
    assert printed is not None, done.stdout
    assert int(printed[1]) > 8, "no episode of CartPole is shorter"


@pytest.mark.parametrize(
    "name", ["first_run", "ppo_trainer", "continuous_control", "several_agents"]
)
def test_a_tutorial_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    """With fewer frames, on one thread."""
    if name == "several_agents":
        pytest.importorskip("vmas")
    blocks = re.findall(r"```python\n(.*?)```", (TUTORIALS / f"{name}.md").read_text(), re.DOTALL)
    code = re.sub(r"total_frames=(3[\d_]+|160_000|60_000)", "total_frames=6_400", "\n".join(blocks))
    script = tmp_path / "tutorial.py"
    script.write_text("import torch\n\ntorch.set_num_threads(1)\n" + code)
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^mean return of the last 100 episodes: -?[\d.]+$", done.stdout, re.MULTILINE)


@pytest.mark.timeout(900)  # on a machine that may be busy
def test_the_loop_of_a_recurrent_policy_runs(tmp_path: Path) -> None:
    """For two rounds, on one thread; the critic's state, which nothing else would miss, too."""
    text = (ROOT / "docs/how_to/recurrent_policies.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    short, replaced = re.subn(r"total_frames=[\d_]+", "total_frames=1_024", code)
    assert replaced == 1
    script = tmp_path / "recurrent.py"
    script.write_text("import torch\n\ntorch.set_num_threads(1)\n" + short + CARRIED)
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"mean return of the last 100 episodes: \d+\n", done.stdout)


@pytest.mark.timeout(900)  # on a machine that may be busy
def test_the_loop_over_a_replay_buffer_runs(tmp_path: Path) -> None:
    """For 10 episodes of Pendulum, on one thread."""
    text = (ROOT / "docs/how_to/off_policy.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    short = code.replace("12_000", "2_016").replace("range(16)", "range(1)")
    assert len(short) < len(code)
    script = tmp_path / "sac.py"
    script.write_text("import torch\n\ntorch.set_num_threads(1)\n" + short)
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    printed = re.search(r"mean return of the last 20 episodes: -(\d+)$", done.stdout.strip())
    assert printed is not None, done.stdout
    assert 500 < int(printed[1]) < 1900


@pytest.mark.timeout(900)  # on a machine that may be busy
def test_a_mask_out_of_info_reaches_the_policy(tmp_path: Path) -> None:
    """By the wrapper of the guide, from an environment that raises at a forbidden action."""
    text = (ROOT / "docs/how_to/carry_info.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1]
    script = tmp_path / "masked.py"
    script.write_text("import torch\n\ntorch.set_num_threads(1)\n" + MASKING_ENV + code)
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(900)  # three starts, on a machine that may be busy
def test_the_tutorial_of_an_own_recipe_survives_a_kill(tmp_path: Path) -> None:
    """In as many lines as it says, and with the bits of a run that was not killed."""
    text = (TUTORIALS / "own_recipe.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    lines = [
        line for line in code.splitlines() if line and line.split()[0] not in ("import", "from")
    ]
    assert len(lines) <= 60
    script = tmp_path / "hover.py"
    script.write_text("import torch\n\ntorch.set_num_threads(1)\n" + code)
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def start(directory: Path) -> subprocess.Popen[str]:
        directory.mkdir(exist_ok=True)
        command = [sys.executable, "-W", "ignore", str(script)]
        return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True)

    process = start(killed)
    wait_until((killed / "hover.pt").exists, timeout_s=200)
    process.kill()
    process.communicate()
    said = []
    for directory in (killed, whole):
        process = start(directory)
        said.append(process.communicate(timeout=200)[0].splitlines()[-2:])
        assert process.returncode == 0
    assert said[0] == said[1]
    assert re.match(r"30720 steps: evaluation return \d", said[0][0])
    losses = [torch.load(directory / "hover.pt")["loss"] for directory in (killed, whole)]
    assert losses[0].keys() == losses[1].keys()
    assert all(torch.equal(losses[0][name], losses[1][name]) for name in losses[0])


def test_the_tutorial_of_many_learners_gives_two_the_bits_of_one(
    warm_servers: None, tmp_path: Path
) -> None:
    """With fewer frames; one learner in this process."""
    text = (TUTORIALS / "many_learners.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    short, replaced = re.subn(r"total_frames=[\d_]+", "total_frames=2_048", code)
    assert replaced == 1
    script = tmp_path / "train.py"
    script.write_text(short)
    printed = io.StringIO()
    with redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(script), run_name="__main__")
    said = printed.getvalue()
    assert re.fullmatch(r"mean return of the last 100 episodes: \d+\npolicy [0-9a-f]{16}\n", said)

    launch = next(line for line in text.splitlines() if line.startswith("torchrun ")).split()[1:-1]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *launch]
    command += [str(QUICK_START), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == said
