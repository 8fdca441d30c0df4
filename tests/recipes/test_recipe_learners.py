"""Recipes under torchrun: one run by several learners, with the bits of one."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import script_paths  # noqa: F401  so that the scripts are found
from recipe_ranks import Deed, Ended, run_recipe
from recipe_runs import CARTPOLE, assert_equal_runs, rows, run

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

SHARDS = f"{CARTPOLE} --num-envs 8 --shards 4"  # 128 steps a round
FLAGS = f"{SHARDS} --total-frames 1024 --log-interval 128 --eval-interval 384"
FLAGS += " --checkpoint-interval 256"


@pytest.fixture(scope="module")
def whole(warm_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one learner makes of it."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(FLAGS, "--output-dir", str(directory))
    return directory


def codes(ended: list[Ended]) -> list[int]:
    return [one.code for one in ended]


@pytest.mark.parametrize("size", [2, 4])
def test_i7_learners_are_one_run_with_the_bits_of_one(
    size: int, whole: Path, tmp_path: Path
) -> None:
    ended = run_recipe(size, FLAGS, "--output-dir", str(tmp_path))
    assert codes(ended) == [0] * size, ended
    assert_equal_runs(whole, tmp_path)
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")][:2] == ["128", "256"]
    assert "1,024 steps (100%)" in ended[0].said
    assert f"learners {size}, environments 8" in ended[0].said
    assert [one.said for one in ended[1:]] == [""] * (size - 1)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        f"step-{step:012d}.{part}"
        for step in (512, 768, 1024)
        for part in ("pt", *(f"part-{rank}-of-{size}" for rank in range(1, size)))
    }


def test_a_signal_to_one_learner_stops_all_and_other_numbers_go_on(
    whole: Path, tmp_path: Path
) -> None:
    """Two learners, then four, then one."""
    stop = partial(Deed, signal.SIGTERM, where="support.run:Run.record")
    ended = run_recipe(2, FLAGS, "--output-dir", str(tmp_path), deed=stop(rank=1, count=6))
    assert codes(ended) == [143, 143], ended
    assert f"stopped; go on with --resume {tmp_path}" in ended[0].said
    assert ended[1].said == ""
    newest = max((tmp_path / "checkpoints").iterdir())
    assert newest.name == "step-000000000256.pt"  # four optimizer steps are a round

    resume = f"ppo_cartpole.py --resume {tmp_path}"
    ended = run_recipe(4, resume, deed=stop(rank=3, count=10))
    assert codes(ended) == [143] * 4, ended
    assert f"resumed from {newest}: 256 of 1,024 steps are done" in ended[0].said

    run(resume)
    assert_equal_runs(whole, tmp_path)
    left = {path.name.partition(".")[0] for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step-000000000640", "step-000000000768", "step-000000001024"}


@pytest.mark.parametrize("recipe", ["a2c_atari.py", "ppo_atari.py --minibatch-size 16 --epochs 2"])
def test_i7_learners_play_games_with_the_bits_of_one(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    flags = f"{recipe} --num-envs 4 --sync-interval 8 --shards 2 --total-frames 96"
    flags += " --log-interval 32 --eval-interval 0"
    run(flags, "--output-dir", str(tmp_path / "one"))
    ended = run_recipe(2, flags, "--output-dir", str(tmp_path / "two"))
    assert codes(ended) == [0, 0], ended
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


def test_without_shards_another_number_of_learners_is_refused(tmp_path: Path) -> None:
    flags = f"{CARTPOLE} --total-frames 128 --eval-interval 0"
    ended = run_recipe(2, flags, "--output-dir", str(tmp_path))
    assert codes(ended) == [0, 0], ended
    said = run("ppo_cartpole.py", "--resume", str(tmp_path), code=1)
    assert "is of 2 learners, and here are 1. Without --shards another number gives" in said
    said = run("ppo_cartpole.py", "--resume", str(tmp_path), "--ignore-versions")
    assert "this run has ended" in said


def test_a_training_that_diverges_ends_all_learners(tmp_path: Path) -> None:
    ended = run_recipe(2, f"{FLAGS} --learning-rate 1e30", "--output-dir", str(tmp_path))
    assert codes(ended) == [1, 1]
    assert all("error: the training has diverged" in one.said for one in ended), ended


def test_a_logger_that_fails_ends_all_learners_and_what_was_learned_is_saved(
    whole: Path, tmp_path: Path
) -> None:
    deed = Deed(0, 0, "support.run:Run._send", 3)
    ended = run_recipe(2, FLAGS, "--output-dir", str(tmp_path), deed=deed)
    assert codes(ended) == [1, 1]
    assert "error: Run._send has failed" in ended[0].said
    assert "error: the run ends, since its first learner has failed" in ended[1].said
    assert max((tmp_path / "checkpoints").iterdir()).name == "step-000000000384.pt"
    run("ppo_cartpole.py", "--resume", str(tmp_path))
    assert_equal_runs(whole, tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seed {rank}", "error: rank 1 has seed 1, the others 0"),
        (
            "--minibatch-size 48",
            "error: --minibatch-size 48 does not fit a batch of 128 steps in 4",
        ),
        ("--num-envs 6", "error: 6 environments can't be shared out equally among 4 shards"),
    ],
)
def test_what_learners_cannot_do_is_told_by_each(flags: str, message: str, tmp_path: Path) -> None:
    ended = run_recipe(2, f"{FLAGS} {flags}", "--output-dir", str(tmp_path / "run"))
    assert codes(ended) == [1, 1]
    for one in ended:
        assert message in one.said
        assert "Traceback" not in one.said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_shards_are_a_power_of_two() -> None:
    assert "error: --shards must be a power of two, and is 3" in run(
        f"{CARTPOLE} --shards 3", code=1
    )
