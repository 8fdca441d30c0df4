"""The metrics of a run, read back from where each logger has put them."""

from __future__ import annotations

import csv
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from recipe_metrics import NAMES
from recipe_runs import CARTPOLE, run, start

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("nothing_left")

SHORT = f"{CARTPOLE} --total-frames 1600 --log-interval 400 --eval-interval 800"

SHORTER = f"{CARTPOLE} --total-frames 128 --eval-interval 0"  # of which no metric is looked at

Points = set[tuple[str, int, float]]  # name, step, value


def points(directory: Path) -> Points:
    """What metrics.csv and evaluations.csv hold."""
    found = set()
    for name in ("metrics.csv", "evaluations.csv"):
        with (directory / name).open() as file:
            for row in csv.DictReader(file):
                step = int(row.pop("step"))
                found |= {(key, step, float(value)) for key, value in row.items()}
    return {point for point in found if not math.isnan(point[2])}


@pytest.fixture(scope="module")
def logged(warm_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with TorchRL's logger of CSV files."""
    directory = tmp_path_factory.mktemp("logged") / "run"
    run(SHORT, "--logger", "csv", "--output-dir", str(directory))
    return directory


def test_metrics_csv_holds_all_that_is_measured(logged: Path) -> None:
    assert {name for name, _, _ in points(logged)} == NAMES
    steps = {step for name, step, _ in points(logged) if name == "loss/critic"}
    assert steps == {448, 832, 1216, 1600}
    shares = {
        name: value
        for name, step, value in points(logged)
        if name.startswith("time/") and step == 1600
    }
    for parts in (
        ("executors_stepping", "executors_waiting_for_action", "executors_waiting_for_round"),
        ("actors_inferring", "actors_waiting"),
        ("learner_learning", "learner_waiting"),
    ):
        assert sum(shares[f"time/{part}"] for part in parts) == pytest.approx(1)
        assert all(0 <= shares[f"time/{part}"] <= 1 for part in parts)


def test_csv(logged: Path) -> None:
    found = set()
    scalars = logged / "csv" / "scalars"
    for path in scalars.rglob("*.csv"):
        name = str(path.relative_to(scalars).with_suffix(""))
        for line in path.read_text().splitlines():
            step, value = line.split(",")
            found.add((name, int(step), float(value)))
    assert found == points(logged)


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(SHORT, "--logger", "tensorboard", "--output-dir", str(tmp_path))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {
        (name, event.step): event.value
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    }
    expected = {(name, step): value for name, step, value in points(tmp_path)}
    assert found == pytest.approx(expected, rel=1e-6)  # float32 there


def wandb_points(file: Path) -> Points:
    from wandb_file import history

    return {
        (name, row[f"{name.partition('/')[0]}/step"], row[name])
        for row in history(file)
        for name in NAMES & row.keys()
    }


def test_wandb_offline_and_the_same_run_resumed(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb_file import run_record

    flags = "--logger wandb --wandb-mode offline --wandb-project p --wandb-group g --wandb-name n"
    # Stopped after the first rows, and resumed: two files of one run. The newest holds all of it,
    # since W&B's own process writes late, and what it has not written is lost with a killed run.
    process = start(SHORT, *flags.split(), "--output-dir", str(tmp_path), unbuffered=True)
    for line in process.stdout:
        if "steps" in line:
            process.terminate()
            break
    process.communicate()
    assert process.returncode == 143
    run("ppo_cartpole.py", "--resume", str(tmp_path))
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert wandb_points(files[-1]) == points(tmp_path)
    runs = [run_record(path) for path in files]
    assert len(runs) == 2
    assert len({each.run_id for each in runs}) == 1
    assert {(each.project, each.run_group, each.display_name) for each in runs} == {("p", "g", "n")}
    config = {item.key: item.value_json for item in runs[0].config.update}
    assert config["total_frames"] == "1600"


VARIABLES = {
    "WANDB_ENTITY": "e",
    "WANDB_NAME": "n",
    "WANDB_PROJECT": "p",
    "WANDB_RUN_GROUP": "g",
    "WANDB_RUN_ID": "abc",
    "WANDB_TAGS": "one,two",
}


@pytest.fixture
def wandb_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """W&B as in a new process, which reads its variables once; none but the given are set."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # with the variable that names its process
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    yield
    wandb.teardown()


def offline_file(directory: Path) -> Path:
    """The only one there is, when W&B's process has written it and ended."""
    import wandb

    wandb.teardown()
    (file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    return file


def identity(file: Path) -> tuple[str, ...]:
    from wandb_file import run_record

    found = run_record(file)
    return (found.entity, found.display_name, found.project, found.run_group, found.run_id)


@pytest.mark.usefixtures("wandb_variables")
def test_wandbs_own_variables_are_obeyed_and_a_resumed_run_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb_file import run_record

    output_dir, files = tmp_path / "run", tmp_path / "files"
    files.mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(files))
    run(SHORT, "--logger", "wandb", "--output-dir", str(output_dir))
    assert not (output_dir / "wandb").exists()
    file = offline_file(files)
    assert identity(file) == ("e", "n", "p", "g", "abc")
    assert list(run_record(file).tags) == ["one", "two"]
    assert wandb_points(file) == points(output_dir)

    # In a shell that has other variables, or none.
    for name in ("WANDB_DIR", "WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_NAME"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_RUN_ID", "xyz")
    monkeypatch.setenv("WANDB_PROJECT", "other")
    run("ppo_cartpole.py", "--resume", str(output_dir))
    assert identity(offline_file(output_dir)) == ("e", "n", "p", "g", "abc")


@pytest.mark.usefixtures("wandb_variables")
def test_a_run_of_an_agent_is_part_of_its_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variables that `wandb agent` sets."""
    from wandb_file import run_record

    drawn = tmp_path / "config.yaml"
    drawn.write_text("wandb_version: 1\nlearning-rate: {value: 0.002}\nepochs: {value: 1}\n")
    variables = {"MODE": "offline", "SWEEP_ID": "s", "SWEEP_PARAM_PATH": str(drawn)}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    flags = f"{SHORT} --logger wandb --learning-rate=0.002 --epochs=1"
    run(flags, "--output-dir", str(tmp_path / "run"))
    file = offline_file(tmp_path / "run")
    record = run_record(file)
    assert (record.run_id, record.sweep_id) == ("abc", "s")
    config = {item.key: item.value_json for item in record.config.update}
    assert config["learning-rate"] == config["learning_rate"] == "0.002"
    assert "evaluation/return_mean" in {name for name, _, _ in wandb_points(file)}


@pytest.mark.usefixtures("wandb_variables")
def test_options_win_over_wandbs_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_DISABLED", "true")
    flags = "--logger wandb --wandb-mode offline --wandb-project q --wandb-group h --wandb-name m"
    run(SHORTER, *flags.split(), "--output-dir", str(tmp_path))
    assert identity(offline_file(tmp_path)) == ("e", "m", "q", "h", "abc")


@pytest.mark.usefixtures("wandb_variables")
@pytest.mark.parametrize("variable", ["WANDB_MODE=disabled", "WANDB_DISABLED=true"])
def test_wandb_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(*variable.split("="))
    output = run(SHORTER, "--logger", "wandb", "--output-dir", str(tmp_path / "run"))
    assert "Weights & Biases is disabled" in output
    assert not list(tmp_path.rglob("*.wandb"))


@pytest.mark.usefixtures("wandb_variables")
def test_a_mode_that_wandb_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "airplane")
    output = run(SHORTER, "--logger", "wandb", "--output-dir", str(tmp_path / "run"), code=1)
    assert "error: Weights & Biases knows no WANDB_MODE 'airplane': set it to online" in output


def test_wandb_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    output = run(SHORTER, "--logger", "wandb", "--output-dir", str(tmp_path / "run"), code=1)
    assert "error: Weights & Biases has no API key: run 'wandb login'" in output


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_logger_whose_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in (package, f"torch.utils.{package}"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    output = run(SHORTER, "--logger", package, "--output-dir", str(tmp_path / "run"), code=1)
    assert f"needs the package {package}" in output
    assert f"pip install 'torchrl_hts[{package}]'" in output
