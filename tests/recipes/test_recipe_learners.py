"""Recipes under torchrun: one run by several learners, with the bits of one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import script_paths  # noqa: F401  so that the scripts are found
from _hosts import Hosts, why_not
from deeds import Deed
from processes import processes_below, wait_until
from recipe_ranks import Ended, run_recipe
from recipe_runs import CARTPOLE, assert_equal_runs, rows, run
from script_paths import RECIPES
from support.errors import RecipeError
from support.old_runs import refuse_old_run

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


def test_i7_learners_are_one_run_with_the_bits_of_one(whole: Path, tmp_path: Path) -> None:
    """Four of them; two of each recipe in test_every_recipe.py."""
    size = 4
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


@pytest.mark.timeout(900)  # two starts of torchrun and torch, on a machine that may be busy
def test_i7_learners_on_hosts_of_their_own_are_one_run(whole: Path, tmp_path: Path) -> None:
    """Two network namespaces, 5 ms apart, between which packets get lost."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    recipe, *flags = FLAGS.split()
    script = [str(RECIPES / recipe), *flags, "--output-dir", str(tmp_path)]
    with Hosts(2, delay_s=0.005, loss=0.005) as hosts:
        learners = [
            subprocess.Popen(
                hosts.torchrun(host, 1, *script),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in range(2)
        ]
        said = [learner.communicate()[0] for learner in learners]
    assert [learner.returncode for learner in learners] == [0, 0], said
    assert_equal_runs(whole, tmp_path)


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


@pytest.mark.parametrize(
    ("deed", "size"),
    [
        (Deed(signal.SIGKILL, 0, "support.checkpoints:Checkpoints.save", 2), 4),
        (Deed(signal.SIGKILL, 1, "support.run:Run.record", 11), 3),  # of which two learn
    ],
    ids=["before the marker", "in an update"],
)
def test_a_killed_learner_costs_what_came_after_the_last_checkpoint(
    deed: Deed, size: int, whole: Path, tmp_path: Path
) -> None:
    """The same command, which torchrun gives again, goes on; here with another number."""
    ended = run_recipe(2, FLAGS, deed=deed, restart="0", directory=tmp_path)
    assert ended[deed.rank].code == -signal.SIGKILL
    other = ended[1 - deed.rank]
    assert other.code == 1
    assert f"error: rank {deed.rank} " in other.said

    ended = run_recipe(size, FLAGS, restart="1", directory=tmp_path)
    assert codes(ended) == [0] * size, ended
    (directory,) = (tmp_path / "runs" / "ppo_cartpole").iterdir()
    assert "resumed from" in ended[0].said
    assert_equal_runs(whole, directory)


@pytest.mark.timeout(900)  # two starts of all, on a machine that may be busy
def test_torchrun_restarts_a_run_and_stops_it(tmp_path: Path) -> None:
    """torchrun itself: a killed rank, then SIGTERM to torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "1"]
    recipe, *flags = f"{FLAGS} --total-frames 1000000 --eval-interval 0".split()
    process = subprocess.Popen(
        [*torchrun, str(RECIPES / recipe), *flags],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []

    def read_until(text: str) -> None:
        for line in process.stdout or ():
            said.append(line)
            if text in line:
                return
        raise AssertionError("".join(said))

    read_until(" steps (")
    wait_until(lambda: any(tmp_path.glob("runs/*/*/checkpoints/*.pt")), timeout_s=60)
    os.kill(rank_of(process.pid, 1), signal.SIGKILL)
    read_until("resumed from")
    read_until(" steps (")
    process.send_signal(signal.SIGTERM)
    output = "".join(said) + process.communicate(timeout=250)[0]
    assert process.returncode != 0
    assert "stopped; go on with --resume" in output
    assert output.count("importing torch and torchrl") == 2  # by one learner of each start
    (directory,) = tmp_path.glob("runs/ppo_cartpole/*")
    steps = [int(row["step"]) for row in rows(directory / "metrics.csv")]
    assert steps == [*range(128, steps[-1] + 1, 128)]
    newest = max((directory / "checkpoints").glob("*.pt"))
    assert int(newest.stem[5:]) == steps[-1]
    assert newest.with_suffix(".part-1-of-2").exists()


def rank_of(torchrun: int, rank: int) -> int:
    """The process that is a rank."""
    for pid in processes_below(torchrun):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_text()
        if f"RANK={rank}".encode() in variables and "ppo_cartpole.py" in command:
            return pid
    raise AssertionError("there is no such rank")


def test_without_shards_another_number_of_learners_is_refused(tmp_path: Path) -> None:
    flags = f"{CARTPOLE} --total-frames 128 --eval-interval 0"
    ended = run_recipe(2, flags, "--output-dir", str(tmp_path))
    assert codes(ended) == [0, 0], ended
    said = run("ppo_cartpole.py", "--resume", str(tmp_path), code=1)
    assert "is of 2 learners, and here are 1. Without --shards another number gives" in said
    said = run("ppo_cartpole.py", "--resume", str(tmp_path), "--ignore-versions")
    assert "this run has ended" in said


def test_minibatches_that_learners_cannot_share_are_refused_before_anything_is_made(
    tmp_path: Path,
) -> None:
    flags = f"{CARTPOLE} --minibatch-size 24 --eval-interval 0"  # one alone may have a smaller last
    ended = run_recipe(2, flags, "--output-dir", str(tmp_path / "run"))
    assert codes(ended) == [1, 1]
    for one in ended:
        assert "error: --minibatch-size 24 does not fit a batch of 64 steps in 2 parts" in one.said
    assert not (tmp_path / "run").exists()


def test_a_training_that_diverges_ends_all_learners(tmp_path: Path) -> None:
    ended = run_recipe(2, f"{FLAGS} --learning-rate 1e30", "--output-dir", str(tmp_path))
    assert codes(ended) == [1, 1]
    assert all("error: the training has diverged" in one.said for one in ended), ended


def test_what_diverges_on_one_learner_alone_is_told_by_each(tmp_path: Path) -> None:
    flags = f"{FLAGS} --env-id walks:Bursts-v0"
    ended = run_recipe(2, flags, "--output-dir", str(tmp_path))
    assert codes(ended) == [1, 1]
    for one in ended:
        assert "error: the training has diverged: loss/" in one.said, ended
        assert "Of rank 1 alone loss/critic is infinite or NaN" in one.said


def test_a_logger_that_fails_ends_all_learners_and_what_was_learned_is_saved(
    whole: Path, tmp_path: Path
) -> None:
    deed = Deed(0, 0, "support.records:Records.send", 3)
    ended = run_recipe(2, FLAGS, "--output-dir", str(tmp_path), deed=deed)
    assert codes(ended) == [1, 1]
    assert "error: Records.send has failed" in ended[0].said
    assert "error: the run ends, since its first learner has failed" in ended[1].said
    assert max((tmp_path / "checkpoints").iterdir()).name == "step-000000000384.pt"
    part = tmp_path / "checkpoints" / "step-000000000384.part-1-of-2"
    part.rename(tmp_path / "part")
    said = run("ppo_cartpole.py", "--resume", str(tmp_path), code=1)
    assert (
        f"the checkpoint {part} can't be read (No such file or directory): put it back, or m"
        in said
    )
    (tmp_path / "part").rename(part)
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
        (
            "--num-envs 6",
            "error: --num-envs 6 environments can't be shared out equally among 4 shards: give a",
        ),
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


def config(directory: Path, launch: str | None) -> Path:
    directory.mkdir(parents=True)
    content = {"recipe": "r", "options": {}, "launch": launch}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def test_a_restart_goes_on_with_the_run_of_its_own_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.launch import is_own, launch_name, own_run

    names = ["Pong-v5-20260101-000000-1", "Pong-v5-20260102-000000-1", "Pong-v5-20260103-000000-1"]
    first, second, _ = (config(tmp_path / name, "job") for name in names)
    (tmp_path / names[2] / "config.json").write_text('{"launch": "another"}')
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # of a node that came later, say
    assert is_own(first)
    assert own_run(tmp_path, "Pong-v5") == second
    assert own_run(tmp_path, "Breakout-v5") is None
    assert not is_own(tmp_path / "nowhere")
    with pytest.raises(RecipeError, match="holds a run already"):
        refuse_old_run(first)

    # Without a name it is that of the process; which may be another's later.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    unnamed = config(tmp_path / "Qbert-v5-20260101-000000-1", launch_name())
    assert re.search(rf" {os.getppid()}$", str(launch_name()))
    assert not is_own(unnamed)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_own(unnamed)
    assert not is_own(first)

    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert launch_name() is None
    assert not is_own(config(tmp_path / "plain", None))
