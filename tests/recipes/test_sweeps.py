"""Sweep files: what W&B's agents make of them, and Optuna."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from full_disks import full_disk
from recipe_runs import rows
from script_paths import RECIPES, ROOT
from small_sweeps import Sweeps
from support.errors import RecipeError
from support.options import RunOptions, parse_options

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
yaml = pytest.importorskip("yaml")

FILES = sorted((RECIPES / "sweeps").glob("*.yaml"))


def ends(how: dict[str, Any]) -> list[Any]:
    """The values of a parameter, or the least and the most."""
    if "value" in how:
        return [how["value"]]
    return how["values"] if "values" in how else [how["min"], how["max"]]


def options_of(program: str, flags: list[str]) -> RunOptions:
    """What a recipe makes of its flags."""
    module = importlib.import_module(Path(program).stem)
    return parse_options(module.Options, module.__doc__, flags)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_an_agent_makes_of_a_file_starts_its_recipe(file: Path) -> None:
    """By the functions that W&B's agent calls, for all that it may draw."""
    agent = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    sweep = agent.load_sweep_config(str(file))
    drawn = {name: ends(how) for name, how in sweep["parameters"].items()}
    for number in range(max(map(len, drawn.values()))):
        chosen = {name: {"value": ends_[number % len(ends_)]} for name, ends_ in drawn.items()}
        filled = agent.create_sweep_command_args({"args": chosen})
        filled |= {"env": ["env"], "interpreter": ["python"], "program": [sweep["program"]]}
        command = []
        for word in agent.create_sweep_command(sweep["command"]):
            command += filled[word[2:-1]] if word.startswith("${") else [word]
        assert command[:3] == ["env", "python", f"recipes/{file.stem}.py"]
        assert (ROOT / command[2]).exists()
        options = options_of(command[2], command[3:])
        assert options.logger == "wandb"
        for name, each in chosen.items():
            assert getattr(options, name.replace("-", "_")) == each["value"]
    assert sweep["metric"]["name"] == "evaluation/return_mean"
    least = sweep["early_terminate"]["min_iter"] * options.eval_interval
    assert 0 < least < options.total_frames


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_optuna_draws_what_a_recipe_takes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optuna = pytest.importorskip("optuna")
    from support.sweeps import read_sweep

    monkeypatch.chdir(ROOT)
    sweep = read_sweep(file)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(20):
        chosen = study.ask(dict(sweep.space)).params
        options = options_of(str(sweep.program), sweep.flags(chosen))
        for name, value in {**sweep.fixed, **chosen}.items():
            assert getattr(options, name.replace("-", "_")) == value


def test_what_is_drawn_from_what(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    from support.sweeps import read_sweep

    file = tmp_path / "sweep.yaml"
    parameters = {
        "log": {"distribution": "log_uniform_values", "min": 0.1, "max": 1},
        "even": {"min": 0.1, "max": 1},
        "whole": {"min": 1, "max": 3},
        "some": {"values": [1, "a"]},
        "fixed": {"value": False},
        "other": {"value": True},
    }
    metric = {"name": "evaluation/return_mean", "goal": "maximize"}
    content = {"program": str(RECIPES / "ppo_cartpole.py"), "metric": metric}
    file.write_text(yaml.safe_dump({**content, "parameters": parameters}))
    sweep, known = read_sweep(file), optuna.distributions
    assert sweep.space == {
        "log": known.FloatDistribution(0.1, 1, log=True),
        "even": known.FloatDistribution(0.1, 1),
        "whole": known.IntDistribution(1, 3),
        "some": known.CategoricalDistribution([1, "a"]),
    }
    assert sweep.flags({"whole": 2}) == ["--no-fixed", "--other", "--whole=2"]


def test_an_option_that_is_drawn_is_not_given_too(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    file = RECIPES / "sweeps" / "ppo_cartpole.yaml"
    command = [
        sys.executable,
        str(RECIPES / "optuna_sweep.py"),
        f"--output-dir={tmp_path / 'sweep'}",
    ]
    command += [str(file), "--learning-rate", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "error: --learning-rate is drawn anew for each trial" in done.stderr
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    "flags", [["--output-dir=other"], ["--output-dir", "other"], ["--resume", "other"]]
)
def test_a_trial_has_the_directory_that_the_sweep_gives_it(sweep: Sweeps, flags: list[str]) -> None:
    sweep.draw(4)
    name = flags[0].partition("=")[0]
    with pytest.raises(RecipeError, match=f"own, in that of the sweep: leave {name} out of the"):
        sweep.run(1, *flags)
    content = yaml.safe_load(sweep.file.read_text())
    content["parameters"][name[2:]] = {"value": "other"}
    sweep.file.write_text(yaml.safe_dump(content))
    with pytest.raises(RecipeError, match=f"leave {name} out"):
        sweep.run(1)
    del content["parameters"][name[2:]]  # as it is told
    sweep.file.write_text(yaml.safe_dump(content))
    assert sweep.run(1) == 0


def test_trials_are_runs_and_the_worse_are_stopped(
    sweep: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    from optuna.trial import create_trial

    study, space = sweep.study(), {"x": sweep.space()}
    for _ in range(5):  # as many as the median begins with
        study.add_trial(
            create_trial(params={"x": 5}, distributions=space, value=6, intermediate_values={1: 5})
        )
    sweep.draw(9, 0, 9)
    assert sweep.run(8) == 0
    assert [trial.state.name for trial in study.trials[5:]] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert [trial.value for trial in study.trials[5:]] == [10, 0, 10]
    assert study.trials[5].intermediate_values == {1: 9, 2: 10}  # NaN is not told
    assert (sweep.directory / "trial-0006" / "saved").exists()
    assert (sweep.directory / "sweep.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "trial-0006 stopped at 0.0 with x 0" in said
    assert f"the best of 8: {sweep.directory / 'trial-0005'} with 10.0" in said
    assert sweep.run(8) == 0, "there is nothing left to do"


def test_a_run_that_fails_is_one_of_the_trials(
    sweep: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.draw(1, 4)
    assert sweep.run(2) == 0
    assert "trial-0000 has failed: error: it has diverged" in capsys.readouterr().out
    assert [trial.state.name for trial in sweep.study().trials] == ["FAIL", "COMPLETE"]


def test_a_run_without_a_finite_value_is_one_of_the_trials(
    sweep: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.draw(5, 4)
    assert sweep.run(2) == 0
    said = capsys.readouterr().out
    assert "trial-0000 has failed: no evaluation/return_mean of it is a finite number" in said
    assert [trial.value for trial in sweep.study().trials] == [None, 5]


def test_a_value_that_is_no_number_is_told_with_its_file(sweep: Sweeps) -> None:
    sweep.draw(6)
    with pytest.raises(RecipeError, match=r"trial-0000/evaluations\.csv has as .*'abc'"):
        sweep.run(1)


def test_a_sweep_whose_trials_have_all_failed_says_where_to_look(sweep: Sweeps) -> None:
    sweep.draw(1, 1)
    said = rf"all 2 trials have failed; {sweep.directory}/trial-\*.log say why. Raise --trials"
    with pytest.raises(RecipeError, match=said):
        sweep.run(2)


@pytest.mark.parametrize("name", ["a?b=c", "a#b", "a%20b", "a{b}", 'a b"c'])
def test_a_sweep_in_a_directory_of_any_name(sweep: Sweeps, name: str) -> None:
    """As a file's name, it is no part of a URL."""
    sweep.directory = sweep.directory.rename(sweep.directory.with_name(name))
    sweep.draw(4)
    assert sweep.run(1) == 0
    assert {path.name for path in sweep.directory.iterdir()} >= {"study.db", "trial-0000"}
    assert len(sweep.study().trials) == 1
    assert not [path for path in sweep.directory.parent.iterdir() if path.name.startswith("a")][1:]


def test_a_study_that_is_damaged_is_one_sentence(sweep: Sweeps) -> None:
    (sweep.directory / "study.db").write_text("this is no database, but it is long enough")
    with pytest.raises(RecipeError, match=r"study\.db can't be read .*: file is not a database\."):
        sweep.run(1)


@pytest.mark.parametrize("begun", [False, True])
def test_a_study_for_which_there_is_no_room_is_one_sentence(sweep: Sweeps, begun: bool) -> None:
    if begun:
        sweep.draw(4)
    with (
        full_disk(4096),
        pytest.raises(RecipeError, match=r"study\.db can't be read or written: .*same command"),
    ):
        sweep.run(1)


def test_a_recipe_that_can_not_begin_ends_the_sweep(sweep: Sweeps) -> None:
    sweep.draw(2)
    with pytest.raises(RecipeError, match=r"has not begun \(.*trial-0000.log\): it can't begin"):
        sweep.run(2)


def test_a_sweep_is_not_gone_on_with_by_another(sweep: Sweeps) -> None:
    sweep.draw(4)
    assert sweep.run(1) == 0
    said = r'another sweep, with arguments \[\] in place of \["--no-more"\]: give .* or another'
    with pytest.raises(RecipeError, match=said):
        sweep.run(2, "--no-more")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  x: {min: 0, max: 9}\n", "  x: {min: 0, max: 8}\n", "space: x .*high=9.* in place of"),
        ("  x: {min: 0, max: 9}\n", "  y: {min: 0, max: 9}\n", "space: no y: give"),
        ("  x: {min: 0, max: 9}\n", "  x: {value: null}\n", "fixed: no x: give"),
        ("  more: {value: false}\n", "", "fixed: more false: give"),
    ],
)
def test_what_is_other_in_a_sweep(sweep: Sweeps, old: str, new: str, said: str) -> None:
    text = sweep.file.read_text()
    sweep.study()
    sweep.file.write_text(text.replace(old, new))
    with pytest.raises(RecipeError, match=f"another sweep, with {said}"):
        sweep.study()


def test_a_sweep_in_another_order_is_the_same(sweep: Sweeps) -> None:
    *head, more, x = sweep.file.read_text().splitlines()
    sweep.study()
    sweep.file.write_text("\n".join([*head, x, more]))
    assert sweep.study().trials == []


def test_a_file_that_is_no_yaml(sweep: Sweeps) -> None:
    sweep.file.write_text("a: b: c")
    with pytest.raises(RecipeError, match=r"understood here \(ScannerError: mapping values are"):
        sweep.run(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "evaluation/return_mean"}, "is not a sweep file that is understood here"),
        ({"metric": {"name": "m", "goal": "up"}}, "goal is maximize or minimize, and not up"),
        ({"parameters": {"x": {"min": 0}}}, r"not a sweep file .*'max'"),
        ({"parameters": {"x": 3}}, "is not a sweep file"),
        (
            {"parameters": {"x": {"distribution": "q_normal", "min": 0, "max": 1}}},
            "unknown distribution q_normal",
        ),
        ({"program": "nowhere.py"}, "names nowhere.py, which is not here"),
    ],
)
def test_a_file_that_is_not_understood(
    sweep: Sweeps, changes: dict[str, Any], message: str
) -> None:
    sweep.file.write_text(yaml.safe_dump({**yaml.safe_load(sweep.file.read_text()), **changes}))
    with pytest.raises(RecipeError, match=message):
        sweep.run(1)


def test_a_metric_that_is_not_logged(sweep: Sweeps) -> None:
    text = sweep.file.read_text().replace("evaluation/return_mean", "evaluation/score")
    sweep.file.write_text(text)
    sweep.draw(4)
    with pytest.raises(RecipeError, match=r"no evaluation/score.*has step, evaluation/return_mean"):
        sweep.run(1)


def test_a_trial_is_a_run_of_the_recipe(sweep: Sweeps) -> None:
    flags = "--num-envs=4 --sync-interval=16 --minibatch-size=32 --total-frames=128"
    flags += " --eval-episodes=2"
    sweep.file.write_text(
        yaml.safe_dump(
            {
                "program": str(RECIPES / "ppo_cartpole.py"),
                "metric": {"name": "evaluation/return_mean", "goal": "maximize"},
                "parameters": {"epochs": {"values": [1]}, "eval-interval": {"value": 64}},
            }
        )
    )
    assert sweep.run(1, *flags.split()) == 0
    found = rows(sweep.directory / "trial-0000" / "evaluations.csv")
    (trial,) = sweep.study(tuple(flags.split())).trials
    values = [float(row["evaluation/return_mean"]) for row in found]
    assert (trial.value, trial.intermediate_values) == (values[1], {1: values[0], 2: values[1]})
