"""Advice in the messages of recipes and benchmarks, followed; where that takes no long training."""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import script_paths  # noqa: F401  so that the scripts are found

pytest.importorskip("matplotlib")
import learning
from _curves import COLUMNS
from _records import read_record
from delay_study import Cell, is_done
from recipe_options import Options, saved_run
from recipe_runs import CARTPOLE, run
from support.checkpoints import Checkpoints
from support.errors import RecipeError
from support.metrics import Table
from support.old_runs import refuse_old_run
from support.options import parse_options
from support.study import load
from support.wandb_variables import check_wandb_variables
from throughput import Measurements


def said_by(call: Callable[[], Any]) -> str:
    """The message with which something is refused."""
    with pytest.raises((RecipeError, SystemExit)) as caught:
        call()
    return str(caught.value)


def parsed(*flags: object) -> Options:
    return parse_options(Options, "", list(map(str, flags)))


def test_a_run_that_is_there_already(tmp_path: Path) -> None:
    old = saved_run(tmp_path)
    message = said_by(lambda: parsed("--output-dir", old))
    assert message.endswith(", or give another --output-dir")
    assert parsed("--output-dir", tmp_path / "other").steps == 3
    refuse_old_run(tmp_path / "other")


def test_a_resumed_run(tmp_path: Path) -> None:
    old = saved_run(tmp_path)
    assert "leave --output-dir out" in said_by(lambda: parsed("--resume", old, "--output-dir", "b"))
    assert "leave them out, or start a new run" in said_by(
        lambda: parsed("--resume", old, "--steps", 10)
    )
    assert parsed("--resume", old).steps == 9
    assert parsed("--steps", 10, "--output-dir", tmp_path / "new").steps == 10
    empty = tmp_path / "empty"
    empty.mkdir()
    message = said_by(lambda: parsed("--resume", empty))
    assert "give the output directory of a run" in message


def test_a_configuration_that_is_damaged(tmp_path: Path) -> None:
    old = saved_run(tmp_path)
    file = old / "config.json"
    whole = file.read_text()
    file.write_text("{")
    message = said_by(lambda: parsed("--resume", old))
    assert "put the file back as it was, or begin anew with another --output-dir" in message
    file.write_text(whole)
    assert parsed("--resume", old).steps == 9


@pytest.mark.parametrize(
    ("name", "wrong", "advice"),
    [
        ("WANDB_MODE", "airplane", "online, offline, shared, disabled, dryrun or run, or unset it"),
        ("WANDB_DIR", __file__, "set WANDB_DIR to another, or unset it"),
    ],
)
def test_variables_of_wandb(
    name: str, wrong: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parsed("--logger", "wandb")
    monkeypatch.setenv(name, wrong)
    assert said_by(lambda: check_wandb_variables(options)).endswith(advice)
    check_wandb_variables(parsed())  # has nothing to do with it
    for right in ("online", "run") if name == "WANDB_MODE" else (tmp_path, tmp_path / "new"):
        monkeypatch.setenv(name, str(right))
        check_wandb_variables(options)
    monkeypatch.delenv(name)
    check_wandb_variables(options)


def test_a_directory_for_wandb_that_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DIR", __file__)
    check_wandb_variables(parsed("--logger", "wandb", "--wandb-mode", "disabled"))
    monkeypatch.setenv("WANDB_DISABLED", "true")
    check_wandb_variables(parsed("--logger", "wandb"))


def test_videos_of_no_evaluations() -> None:
    message = said_by(lambda: parsed("--record-video", "--eval-interval", 0))
    assert "leave --eval-interval 0 out" in message
    assert parsed("--record-video").record_video


def test_a_damaged_checkpoint_is_moved_away(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 3)
    for step in (1, 2):
        checkpoints.save(step, {"step": step})
    newest = checkpoints.paths()[-1]
    newest.write_bytes(newest.read_bytes()[:-40])
    message = said_by(checkpoints.load)
    assert message.endswith(f"move it away to go on from {checkpoints.paths()[0].name}")
    newest.rename(tmp_path / "elsewhere")
    found = checkpoints.load()
    assert found is not None
    assert found["step"] == 1
    checkpoints.paths()[0].write_bytes(b"")
    assert said_by(checkpoints.load).endswith("move it away to begin anew")
    checkpoints.paths()[0].rename(tmp_path / "elsewhere too")
    assert checkpoints.load() is None


def test_metrics_are_put_back(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    table = Table(file)
    table.append({"a": 1.0})
    table.append({"a": 2.0})
    table.close()
    whole = file.read_bytes()
    for damaged in (whole[:4], b"a\nx\ny\n"):
        file.write_bytes(damaged)
        assert "put the file back as it was" in said_by(lambda: Table(file, keep=2))
    file.write_bytes(whole)
    Table(file, keep=2).close()


@pytest.mark.usefixtures("warm_servers")
def test_a_run_in_a_place_where_another_is_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    short = f"{CARTPOLE} --total-frames 64 --eval-interval 0"
    message = run(short, "--output-dir", str(tmp_path / "file"), code=1)
    assert message.endswith("give another --output-dir\n")
    printed = run(short, "--output-dir", str(tmp_path / "another"))
    assert "Traceback" not in printed


@pytest.mark.usefixtures("warm_servers")
def test_a_run_where_another_is_at_work(tmp_path: Path) -> None:
    short = f"{CARTPOLE} --total-frames 64 --eval-interval 0"
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        message = run(short, "--output-dir", str(tmp_path), code=1)
        assert message.endswith("wait for its end, or give another --output-dir\n")
    printed = run(short, "--output-dir", str(tmp_path))  # the other has ended
    assert "Traceback" not in printed


@pytest.mark.usefixtures("warm_servers")
def test_a_training_that_diverges(tmp_path: Path) -> None:
    short = f"{CARTPOLE} --total-frames 256 --eval-interval 0"
    message = run(f"{short} --learning-rate 1e30", "--output-dir", str(tmp_path / "one"), code=1)
    assert "error: the training has diverged" in message
    assert message.endswith("with another --output-dir and a lower --learning-rate\n")
    printed = run(f"{short} --learning-rate 1e-3", "--output-dir", str(tmp_path / "two"))
    assert "Traceback" not in printed


def test_cells_of_a_study(tmp_path: Path) -> None:
    assert "run the study first" in said_by(lambda: load(tmp_path))


def test_a_cell_of_other_settings(tmp_path: Path) -> None:
    cell = Cell("cartpole", "ppo", "lag1-delayed", 1.0, 0, 1000)
    file = tmp_path / f"{cell.name}.json"
    file.write_text(json.dumps(cell.description() | {"total_frames": 2000}))
    message = said_by(lambda: is_done(cell, tmp_path))
    assert message.endswith("delete it, or give another --output-dir")
    assert not is_done(cell, tmp_path / "another")
    file.unlink()
    assert not is_done(cell, tmp_path)


def test_a_training_without_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there are rows and no policies, nothing is trained, until the rows are removed."""
    begun: list[list[str]] = []

    def begin(command: list[str], **options: Any) -> Any:
        if command[0] != sys.executable:  # git, which is asked for the commit
            return run_process(command, **options)
        begun.append(command)
        return argparse.Namespace(returncode=1)  # trains nothing here

    run_process = subprocess.run
    flags = ["--contenders", "hts", "--evaluate-every", "10", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["learning.py", *flags])
    monkeypatch.setattr(subprocess, "run", begin)
    file = tmp_path / "hts-seed0.csv"
    rows = [",".join(COLUMNS), *([",".join(["1"] * len(COLUMNS))] * 2)]
    file.write_text("\n".join(rows))
    assert learning.main() == 0
    assert f"{file} is of a training that kept no policies: remove it" in capsys.readouterr().err
    assert not begun
    file.unlink()
    assert learning.main() == 1
    assert begun


def test_a_record_of_step_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, parser = tmp_path / "football_steps.json", argparse.ArgumentParser()

    def told() -> str:
        with pytest.raises(SystemExit, match="2"):
            read_record(parser, file)
        return capsys.readouterr().err

    assert "run football_steps.py first" in told()
    file.write_text(json.dumps({"results": {}}))
    assert "run it first" in told()
    file.write_text(json.dumps({"results": {"old": {"mean_s": 1}}}))
    assert "run football_steps.py again" in told()
    file.write_text(json.dumps({"results": {"new": {"step_us": [1], "reset_us": [1]}}}))
    assert read_record(parser, file)["results"]


def test_measurements_under_other_conditions(tmp_path: Path) -> None:
    file = tmp_path / "throughput.json"
    Measurements(file, {"threads": 1}).add({"engine": "gfootball"}, {"steps_per_s": 1.0})
    message = said_by(lambda: Measurements(file, {"threads": 2}))
    assert "give it an --output-dir of its own" in message
    assert Measurements(tmp_path / "own.json", {"threads": 2}).records == []
    assert len(Measurements(file, {"threads": 1}).records) == 1
