"""The recipes as a user runs them: what they leave, and that they go on bit for bit."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from deeds import Deed
from recipe_runs import CARTPOLE, assert_equal_runs, rows, run, start
from script_paths import RECIPES
from warm_recipes import WarmRecipe, stop_at, stop_run

pytest.importorskip("ale_py")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("nothing_left")

LONG = f"{CARTPOLE} --total-frames 10000 --log-interval 300 --eval-interval 1000"
PONG = "ppo_atari.py --num-envs 2 --sync-interval 16 --minibatch-size 16 --epochs 1"
PONG += " --total-frames 480 --log-interval 64 --eval-interval 0"


def test_ppo_leaves_what_it_has_done(tmp_path: Path) -> None:
    flags = f"{CARTPOLE} --total-frames 192 --log-interval 64 --eval-interval 128"
    output = run(flags, "--output-dir", str(tmp_path), "--require-return", "1")
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["64", "128", "192"]
    assert [row["step"] for row in rows(tmp_path / "evaluations.csv")] == ["128", "192"]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    for text in (
        *("192 steps (100%)", "episodes", "loss critic", "steps/s now", "evaluation return"),
        *("% stepping", "% waiting for actions", "% for rounds", "% inferring", "% learning"),
    ):
        assert text in output


def test_a_bar_that_is_missed(tmp_path: Path) -> None:
    flags = f"{CARTPOLE} --total-frames 64 --require-return 501"
    output = run(flags, "--output-dir", str(tmp_path), code=1)
    assert "below the required 501.0; try more --total-frames" in output


@pytest.mark.parametrize("recipe", ["a2c_atari.py", "ppo_atari.py --minibatch-size 16"])
def test_a_game_with_all_options(tmp_path: Path, recipe: str) -> None:
    flags = "--num-envs 2 --sync-interval 16 --total-frames 64 --log-interval 32 --lag 2"
    flags += " --env-id ALE/Breakout-v5 --terminal-on-life-loss --sticky-actions --eval-sampled"
    flags += " --eval-interval 64 --eval-episodes 1 --record-video --num-actors 2"
    flags += " --eval-max-steps 30"
    run(f"{recipe} {flags}", "--output-dir", str(tmp_path))
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["32", "64"]
    policy = torch.load(tmp_path / "policy.pt")
    assert any(value.shape == (4, 512) for value in policy.values())
    best = torch.load(tmp_path / "best.pt")
    assert best["step"] == 64
    assert all(torch.equal(best["policy"][name], policy[name]) for name in policy)
    assert b"ftyp" in (tmp_path / "best.mp4").read_bytes()[:64]
    (evaluation,) = rows(tmp_path / "evaluations.csv")
    assert 0 < float(evaluation["evaluation/length_mean"]) <= 30


def test_the_display_on_a_terminal(tmp_path: Path) -> None:
    """Kept up to date in place, four times a second, with evaluations as lines above."""
    ours, terminal = pty.openpty()
    recipe, *flags = f"{CARTPOLE} --total-frames 960 --log-interval 64".split()
    process = subprocess.Popen(
        [sys.executable, str(RECIPES / recipe), *flags, "--output-dir", str(tmp_path / "run")],
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # at the end of all who write to it
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    assert b"\x1b[1A" in shown, "the bar and the metrics are drawn over"
    for part in ("960 of 960 steps", "960 steps: evaluation return", "learner", "executors"):
        assert part in text
    assert "Traceback" not in text


@pytest.fixture(scope="module")
def whole_runs(
    warm_servers: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Runs that nobody has killed, by their arguments."""

    @cache
    def whole(arguments: str) -> Path:
        directory = tmp_path_factory.mktemp("whole") / "run"
        run(arguments, "--output-dir", str(directory), "--checkpoint-interval", "0")
        return directory

    return whole


@pytest.mark.timeout(1200)  # up to ten starts, on a machine that may be busy
@pytest.mark.parametrize(
    ("arguments", "interval", "kills", "seed"),
    [*((LONG, "64", 5, seed) for seed in range(4)), (PONG, "32", 3, 4)],
    ids=["cartpole 0", "cartpole 1", "cartpole 2", "cartpole 3", "pong"],
)
def test_i7_a_run_killed_at_any_moment_goes_on_bit_for_bit(
    tmp_path: Path,
    whole_runs: Callable[[str], Path],
    warm_recipes: Callable[[str], WarmRecipe],
    arguments: str,
    interval: str,
    kills: int,
    seed: int,
) -> None:
    """In all 20 kills of CartPole, and 3 of Pong."""
    moments = random.Random(seed)
    survived, runs = 0, 0
    recipe, *flags = arguments.split()
    output = tmp_path / "output"
    resumed: list[str] = []
    warm = warm_recipes(recipe.removesuffix(".py"))
    while survived < kills or resumed:
        killed = tmp_path / f"killed {runs}"
        where = resumed or ["--output-dir", str(killed)]
        process = warm.start([*flags, *where, "--checkpoint-interval", interval], output)
        while "steps" not in output.read_text() and not process.has_ended():
            time.sleep(0.01)
        # From when it trains on, any moment.
        if process.exit_status(300 if survived == kills else moments.uniform(0, 1)) is None:
            process.kill()
            process.exit_status(20)
            survived += 1
            checkpoints = list((killed / "checkpoints").glob("step-*.pt"))
            resumed = ["--resume", str(killed)] if checkpoints else []
            runs += not checkpoints
        else:
            assert process.exit_status(0) == 0, output.read_text()
            assert_equal_runs(whole_runs(arguments), killed)
            resumed = []
            runs += 1
        process.hang_up()
        process.close()
    assert runs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_saves_and_goes_on(
    tmp_path: Path,
    whole_runs: Callable[[str], Path],
    warm_recipes: Callable[[str], WarmRecipe],
    number: int,
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("nohup keeps this signal from the tests, as it does from runs")
    stopped = tmp_path / "stopped"
    flags = f"{LONG} --total-frames 3200"
    whole = whole_runs(flags)
    deed = Deed(number, rank=0, where="support.run:Run.record", count=20)
    code, output = stop_at(warm_recipes, flags, stopped, deed)
    assert code == 128 + number, output
    assert f"stopped; go on with --resume {stopped}" in output
    assert len(rows(stopped / "metrics.csv")) < len(rows(whole / "metrics.csv"))
    assert (stopped / "curve.png").exists()
    run("ppo_cartpole.py", "--resume", str(stopped))
    assert_equal_runs(whole, stopped)


def test_training_is_safe_while_the_last_evaluation_runs(
    tmp_path: Path,
    whole_runs: Callable[[str], Path],
    warm_recipes: Callable[[str], WarmRecipe],
) -> None:
    stopped = tmp_path / "stopped"
    flags = f"{PONG.replace('--eval-interval 0', '')} --eval-episodes 1 --total-frames 64"
    flags += " --eval-max-steps 400"
    saved = "checkpoints/step-*64.pt"
    code, output = stop_run(warm_recipes, flags, stopped, signal.SIGTERM, "64 steps (100%)", saved)
    assert code == 143, output
    assert rows(stopped / "evaluations.csv") == []
    run("ppo_atari.py", "--resume", str(stopped))
    whole = whole_runs(flags)
    assert len(rows(whole / "evaluations.csv")) == 1
    assert_equal_runs(whole, stopped)


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    process = start(LONG, "--output-dir", str(tmp_path), unbuffered=True)
    for line in process.stdout:
        if "steps" in line:
            break
    for flag in ("--output-dir", "--resume"):
        output = run("ppo_cartpole.py", flag, str(tmp_path), code=1)
        assert "holds a run already" in output or "another run is at work" in output
    process.kill()
    process.communicate()


def test_an_output_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = run(CARTPOLE, "--output-dir", str(tmp_path / "file"), code=1)
    assert "can't be written to: Not a directory; give another --output-dir" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("ppo_atari.py --env-id ALE/Pongg-v5", "Pongg"),
        ("ppo_atari.py --env-id Pong-v5", "prefix the name of the game with 'ALE/'"),
        ("ppo_atari.py --resume /nowhere", "/nowhere holds no run to go on with"),
        ("ppo_atari.py --num-envs 0", "--num-envs must be at least 1, and is 0"),
        ("ppo_atari.py --keep-checkpoints 0", "--keep-checkpoints must be at least 1"),
        ("a2c_atari.py --env-id ALE/Xyz-v5", "Its games are Adventure, "),
        ("ppo_cartpole.py --env-id FrozenLake-v1", "observed as vectors (Box, one dimension)"),
        ("ppo_cartpole.py --env-id Pendulum-v1", "plays environments with Discrete actions"),
        ("ppo_cartpole.py --require-return 1 --eval-interval 0", "leave --eval-interval 0 out"),
    ],
)
def test_bad_input_is_one_clear_message(tmp_path: Path, flags: str, message: str) -> None:
    directory = [] if "resume" in flags else ["--output-dir", str(tmp_path / "run")]
    output = run(flags, *directory, code=1)
    assert output.startswith("error: ")
    assert message in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("package", ["ale_py", "imageio_ffmpeg"])
def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    output = run("ppo_atari.py --record-video", "--output-dir", str(tmp_path / "run"), code=1)
    assert "pip install 'torchrl_hts[" in output


@pytest.fixture(scope="module")
def finished_run(warm_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("finished") / "run"
    flags = f"{CARTPOLE} --total-frames 256 --checkpoint-interval 64 --keep-checkpoints 2"
    run(flags, "--output-dir", str(directory))
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": "a2c_atari"}, "of recipe 'a2c_atari'"),
        ({"format": 0}, "format 0; this is 'ppo_cartpole', format 2"),
        ({"versions": {"torch": "1.0"}}, r"torch was 1.0 and is 2.*pass --ignore-versions"),
        ({"options": {"env_id": "Acrobot-v1"}}, "--env-id was Acrobot-v1 and is CartPole-v1"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    finished_run: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    copied = shutil.copytree(finished_run, tmp_path / "run")
    path = max((copied / "checkpoints").iterdir())
    state = torch.load(path)
    for name, value in change.items():
        state[name] = {**state[name], **value} if isinstance(value, dict) else value
    torch.save(state, path)
    before = (copied / "metrics.csv").read_bytes()
    output = run("ppo_cartpole.py", "--resume", str(copied), code=1)
    assert re.search(message, output), output
    assert (copied / "metrics.csv").read_bytes() == before


def test_a_cut_off_checkpoint_and_the_one_before_it(finished_run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(finished_run, tmp_path / "run")
    path = max((copied / "checkpoints").iterdir())
    path.write_bytes(path.read_bytes()[:5000])
    output = run("ppo_cartpole.py", "--resume", str(copied), code=1)
    assert (
        "is damaged, cut off, of another version of torch, or not only data: move it away to go on "
        "from step-000000000192.pt" in output
    )
    path.unlink()
    run("ppo_cartpole.py", "--resume", str(copied))
    assert_equal_runs(finished_run, copied)
