"""recipes/sac_mujoco.py, on Pendulum, which needs no MuJoCo."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import script_paths  # noqa: F401  so that the recipes are found
import torch
from recipe_ranks import run_recipe
from recipe_runs import assert_equal_runs, rows, run
from replaying import replay
from support.continuous import make_bounded
from support.errors import RecipeError
from support.options import parse_options
from support.sac_options import SACOptions
from tensordict import TensorDict

from torchrl_hts import HTSCollector

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("nothing_left")

# Rounds of 32 steps, two of them random; the buffer is full after three.
PENDULUM = "sac_mujoco.py --env-id Pendulum-v1 --num-envs 4 --sync-interval 8 --total-frames 192"
PENDULUM += " --init-random-frames 64 --buffer-size 96 --batch-size 16 --utd-ratio 0.125"
PENDULUM += " --hidden-units 8 --log-interval 32 --checkpoint-interval 32 --keep-checkpoints 9"
PENDULUM += " --eval-interval 96 --eval-episodes 1"


@pytest.fixture(scope="module")
def whole(warm_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one learner and two shards that nobody has stopped."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(PENDULUM, "--shards", "2", "--output-dir", str(directory))
    return directory


def state_of(directory: Path, step: int) -> dict[str, Any]:
    """The parts of a run's checkpoint."""
    return torch.load(directory / "checkpoints" / f"step-{step:012d}.pt")["parts"]


def cut_off(directory: Path, copy: Path, step: int) -> Path:
    """A copy of a run without what came after its checkpoint of a step."""
    shutil.copytree(directory, copy)
    for path in (copy / "checkpoints").iterdir():
        if int(path.name[5:17]) > step:
            path.unlink()
    return copy


def assert_equal_buffers(one: Path, other: Path, step: int) -> None:
    """Bit for bit, in both parts."""
    states = [state_of(directory, step)["experience"]["parts"] for directory in (one, other)]
    for first, second in zip(*states, strict=True):
        assert first["writer"] == second["writer"]
        assert (TensorDict(first["steps"]) == TensorDict(second["steps"])).all()


@pytest.mark.parametrize("step", [32, 128], ids=["while at random", "when the buffer was full"])
def test_i7_a_resumed_run_draws_the_same_steps(whole: Path, tmp_path: Path, step: int) -> None:
    resumed = cut_off(whole, tmp_path / "resumed", step)
    assert f"{step} of 192 steps are done" in run("sac_mujoco.py --resume", str(resumed))
    assert_equal_runs(whole, resumed)
    assert_equal_buffers(whole, resumed, 192)


@pytest.mark.parametrize("fixed", [[], ["--alpha", "0.2"]], ids=["learned", "fixed"])
def test_i7_also_without_shards(tmp_path: Path, fixed: list[str]) -> None:
    """The loss then draws from torch's own generator."""
    run(PENDULUM, *fixed, "--output-dir", str(tmp_path / "whole"))
    resumed = cut_off(tmp_path / "whole", tmp_path / "resumed", 96)
    run("sac_mujoco.py --resume", str(resumed))
    assert_equal_runs(tmp_path / "whole", resumed)
    alphas = {row["policy/alpha"] for row in rows(resumed / "metrics.csv")[1:]}
    assert (len(alphas) == 1) == bool(fixed)


@pytest.mark.timeout(600)  # three runs of two processes, on a machine that may be busy
def test_i7_other_numbers_of_learners_go_on(whole: Path, tmp_path: Path) -> None:
    """One, then two, then one: each takes the buffers of its environments."""
    by_two = cut_off(whole, tmp_path / "by two", 96)
    ended = run_recipe(2, "sac_mujoco.py", "--resume", str(by_two))
    assert [one.code for one in ended] == [0, 0], ended
    assert_equal_runs(whole, by_two)
    by_one = cut_off(by_two, tmp_path / "by one", 128)
    run("sac_mujoco.py --resume", str(by_one))
    assert_equal_runs(whole, by_one)
    assert_equal_buffers(whole, by_one, 192)


def test_nothing_is_learned_from_while_actions_are_random(whole: Path) -> None:
    losses = [float(row["loss/actor"]) for row in rows(whole / "metrics.csv")]
    assert [math.isnan(loss) for loss in losses] == [True, *[False] * 5]
    first, last = state_of(whole, 32), state_of(whole, 192)
    assert not first["optimizer"]["state"]
    assert {int(state["step"]) for state in last["optimizer"]["state"].values()} == {5 * 4}
    actions = torch.cat([part["steps"]["action"] for part in first["experience"]["parts"]])
    make_env = partial(make_bounded, "Pendulum-v1")
    with HTSCollector([make_env] * 4, frames_per_batch=32, total_frames=32, seed=0) as at_random:
        (batch,) = at_random
    assert torch.equal(actions, batch["action"].reshape(-1, 1))
    assert actions.abs().max() > 1


def test_a_replay_films_what_was_random_too(whole: Path) -> None:
    for round_ in (1, 5):
        output = replay(whole, "--round", round_, "--env", 3, "--from-start")
        assert f"environment 3, round {round_}: an episode of" in output
        assert "the same as in the run, bit for bit: rows of metrics.csv (" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--utd-ratio 0.01", "--utd-ratio 0.01 makes no optimizer step of a round of 32 steps"),
        ("--total-frames 100", "--init-random-frames 5000 leaves nothing of --total-frames 100"),
        ("--buffer-size 16", "--buffer-size 16 can't hold the 32 steps of a round: give more"),
        ("--batch-size 2000000", "--batch-size must be at most 1048576, and is 2000000"),
        ("--batch-size 6 --shards 4", "--batch-size 6 steps can't be shared out equally among 4 s"),
        ("--buffer-size 998 --shards 4", "--buffer-size 998 steps can't be shared out equally am"),
        ("--num-envs 6 --shards 4", "--num-envs 6 environments can't be shared out equally among"),
        ("--require-return 1 --eval-interval 0", "leave --eval-interval 0 out"),
    ],
)
def test_options_that_make_no_sense_are_one_sentence(flags: str, message: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        parse_options(SACOptions, "", flags.split())
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_learners_share_a_sample_out() -> None:
    SACOptions().check_learners(4)
    with pytest.raises(
        RecipeError, match=r"--batch-size 258 steps .* among 4 learners: give a mul"
    ):
        SACOptions(batch_size=258).check_learners(4)


@pytest.mark.parametrize("flag", ["--minibatch-size", "--epochs", "--gae-lambda", "--clip-epsilon"])
def test_options_of_ppo_are_not_offered(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(SACOptions, "", [flag, "1"])
    assert f"unrecognized arguments: {flag} 1" in capsys.readouterr().err


def test_the_defaults_are_those_of_their_source() -> None:
    """CleanRL's sac_continuous_action.py, but for the environments."""
    options = parse_options(SACOptions, "", [])
    assert (options.total_frames, options.buffer_size, options.batch_size) == (10**6, 10**6, 256)
    assert (options.learning_rate, options.critic_learning_rate) == (3e-4, 1e-3)
    assert (options.gamma, options.tau, options.init_random_frames) == (0.99, 0.005, 5_000)
    assert options.updates_per_batch == options.frames_per_batch


class Unbounded(gym.Env[Any, Any]):
    """Its actions may be any."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-math.inf, math.inf, (1,))


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("Unbounded-v0", "draws actions between their bounds, and those of Unbounded-v0 have none"),
        ("CartPole-v1", "those of CartPole-v1 are Discrete(2): ppo_cartpole.py plays Discrete one"),
    ],
)
def test_a_task_that_cannot_be_is_one_sentence(tmp_path: Path, env_id: str, message: str) -> None:
    gym.register("Unbounded-v0", Unbounded, disable_env_checker=True)
    try:
        output = run("sac_mujoco.py --env-id", env_id, "--output-dir", str(tmp_path / "r"), code=1)
    finally:
        del gym.registry["Unbounded-v0"]
    assert output.startswith("error: ")
    assert message in output
    assert not (tmp_path / "r").exists()


def test_a_return_that_is_missed(tmp_path: Path) -> None:
    output = run(PENDULUM, "--require-return", "0", "--output-dir", str(tmp_path), code=1)
    assert "is below the required 0.0; try more --total-frames" in output
