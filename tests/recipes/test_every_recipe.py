"""What every recipe does alike: options, metrics, files, exact resume, and learners of one run."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from recipe_ranks import run_recipe
from recipe_runs import assert_equal_runs, rows, run
from replaying import play, replay
from script_paths import RECIPES
from small_recipes import SMALL, flags_of, is_saved, options_of
from support.options import parse_options

pytest.importorskip("rich")
pytest.importorskip("matplotlib")


def test_each_recipe_is_tested_and_has_a_sweep_and_runs_on_ray() -> None:
    frame = "from support.run import Run\n"
    framed = {path.stem for path in RECIPES.glob("*.py") if frame in path.read_text()}
    assert framed == {*SMALL}
    assert framed <= {path.stem for path in (RECIPES / "sweeps").glob("*.yaml")}
    assert framed == {*importlib.import_module("ray_train").RECIPES}


@pytest.mark.parametrize("recipe", SMALL)
def test_help_explains_each_option(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(recipe)
    with pytest.raises(SystemExit, match="0"):
        parse_options(module.Options, module.__doc__, ["--help"])
    shown = re.sub(r"\s+", "", capsys.readouterr().out)
    assert re.sub(r"\s+", "", module.__doc__) in shown
    for entry in fields(module.Options):
        explained = re.sub(r"\s+", "", entry.metadata["help"])
        assert f"--{entry.name.replace('_', '-')}" in shown
        assert explained in shown


@pytest.mark.parametrize("recipe", SMALL)
def test_a_heading_speaks_of_defaults_only_where_they_are_this_recipes(recipe: str) -> None:
    options = importlib.import_module(recipe).Options
    for owner in options.__mro__[:-1]:
        heading = (owner.__doc__ or "").split("\n")[0]
        if "default" in heading:
            changed = [
                entry.name
                for entry in fields(owner)
                if getattr(options, entry.name) != getattr(owner, entry.name)
            ]
            assert not changed, heading


@pytest.mark.timeout(900)  # four runs, one of them of two processes, on a busy machine
@pytest.mark.parametrize("recipe", SMALL)
def test_i7_a_run_its_files_its_resumption_and_its_learners(recipe: str, tmp_path: Path) -> None:
    small = f"{recipe}.py {flags_of(recipe)}"
    whole, resumed, of_two = tmp_path / "whole", tmp_path / "resumed", tmp_path / "of two"
    round_ = 4 * options_of(recipe).sync_interval
    steps = [round_, 2 * round_, 3 * round_, 4 * round_]
    flags = f"{small} --shards 2 --total-frames {steps[-1]}"
    flags += f" --log-interval {round_} --checkpoint-interval {round_} --keep-checkpoints 3"
    flags += f" --eval-interval {steps[2]} --eval-episodes 1"

    said = run(flags, "--output-dir", str(whole))
    assert f"{steps[-1]} steps (100%)" in said
    for name in ("metrics.csv", "evaluations.csv", "config.json", "policy.pt", "best.pt"):
        assert (whole / name).stat().st_size, name
    assert (whole / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((whole / "config.json").read_text())["recipe"] == recipe
    metrics = rows(whole / "metrics.csv")
    assert [int(row["step"]) for row in metrics] == steps
    for group in ("episode/", "loss/", "policy/entropy", "optim/gradient_norm"):
        assert any(name.startswith(group) for name in metrics[0])
    assert [int(row["step"]) for row in rows(whole / "evaluations.csv")] == steps[2:]
    checkpoints = sorted((whole / "checkpoints").iterdir())
    assert [int(path.stem[5:]) for path in checkpoints] == steps[1:]
    assert "bit for bit what the run's own evaluation gave" in play(whole)

    shutil.copytree(whole, resumed)
    for path in checkpoints[1:]:
        (resumed / "checkpoints" / path.name).unlink()
    begins_anew = pytest.warns(UserWarning, match="begin new episodes")
    with contextlib.nullcontext() if is_saved(recipe) else begins_anew:
        said = run(f"{recipe}.py", "--resume", str(resumed))
    assert f"{steps[1]} of {steps[-1]} steps are done" in said
    if is_saved(recipe):
        assert_equal_runs(whole, resumed)
    else:
        assert [int(row["step"]) for row in rows(resumed / "metrics.csv")] == steps

    ended = run_recipe(2, flags, "--output-dir", str(of_two))
    assert [one.code for one in ended] == [0, 0], ended
    assert_equal_runs(whole, of_two)
    said = replay(of_two, "--round", 3, "--env", 3)  # which the second of them has had
    assert f"step-{steps[1]:012d}.pt" in said or not is_saved(recipe)
    assert "environment 3, round 3: an episode of" in said
    assert "the same as in the run, bit for bit: rows of metrics.csv (" in said
