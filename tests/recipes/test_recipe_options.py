"""Options: a flag for each field, one place of defaults, and what a resumed run may change."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from recipe_options import Options, saved_run
from support.checkpoints import Checkpoints
from support.errors import RecipeError
from support.metrics import Table
from support.old_runs import refuse_old_run
from support.options import differences, from_json, parse_options, to_json
from support.study import parse
from support.trained import open_run


def test_each_field_is_a_flag_of_its_type() -> None:
    assert parse_options(Options, "", []) == Options()
    given = ["--steps", "7", "--rate", "2", "--fast", "--goal", "475", "--kind", "b", "--seed", "5"]
    expected = Options(steps=7, rate=2.0, fast=True, goal=475.0, kind="b", seed=5)
    assert parse_options(Options, "", given) == expected
    assert parse_options(Options, "", ["--no-fast"]) == Options()
    with pytest.raises(SystemExit, match="2"):
        parse_options(Options, "", ["--kind", "c"])


@pytest.mark.parametrize(
    ("flags", "fast"),
    [
        (["--fast"], True),
        (["--fast=True"], True),
        (["--fast=false"], False),
    ],
)
def test_a_switch_may_be_told_as_wandbs_agents_do(flags: list[str], fast: bool) -> None:
    assert parse_options(Options, "", flags).fast == fast


def test_a_switch_takes_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(Options, "", ["--fast=perhaps"])
    assert "--fast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        (
            "ppo_recurrent",
            ["--sync-interval", "48"],
            "whole rows, which have 48 steps",
        ),
        (
            "ppo_cartpole",
            ["--shards", "8", "--minibatch-size", "60"],
            "512 steps in 8 parts: .*, as with --minibatch-size 64$",
        ),
        (
            "ppo_atari",
            ["--shards", "8", "--minibatch-size", "100"],
            "1024 steps in 8 parts: .*, as with --minibatch-size 128$",
        ),
        (
            "ppo_recurrent",
            ["--shards", "4", "--minibatch-size", "96", "--sync-interval", "48", "--num-envs", "4"],
            "192 steps in 4 parts: .*, as with --minibatch-size 192$",
        ),
        (
            "ppo_cartpole",
            ["--shards", "32"],
            "--num-envs 16 environments can't be shared .* 32 shards: give a multiple of 32",
        ),
        (
            "a2c_atari",
            ["--shards", "8", "--num-envs", "12"],
            "--num-envs 12 environments can't be shared .* 8 shards: give a multiple of 8",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_anything_is_made(
    recipe: str, flags: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_options(importlib.import_module(recipe).Options, "", flags)


def test_options_are_named_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep couldn't tell else that an option is one that it draws."""
    for flags in (["--rat", "2"], ["--rat=2"], ["--no-fas"]):
        with pytest.raises(SystemExit, match="2"):
            parse_options(Options, "", flags)
        assert f"unrecognized arguments: {' '.join(flags)}" in capsys.readouterr().err


def test_an_integer_may_be_written_as_a_float_without_a_fraction() -> None:
    given = ["--total-frames", "1e4", "--steps", "2.0", "--shards", "4e0"]
    assert parse_options(Options, "", given) == Options(total_frames=10_000, steps=2, shards=4)
    study = parse("", ["--total-frames", "1e4", "--seeds", "1e0", "2"])
    assert (study.total_frames, study.seeds) == (10_000, [1, 2])
    for wrong in ("1.5", "nan", "1e", ""):
        with pytest.raises(SystemExit, match="2"):
            parse_options(Options, "", ["--steps", wrong])


def test_values_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RecipeError, match="--workers must be at least 1, and is 0"):
        parse_options(Options, "", ["--workers", "0"])
    with pytest.raises(RecipeError, match="--steps must be at most 100, and is 101"):
        parse_options(Options, "", ["--steps", "101"])
    with pytest.raises(RecipeError, match="--total-frames must be at least 1, and is -5"):
        parse_options(Options, "", ["--total-frames", "-5"])
    with pytest.raises(RecipeError, match="--record-video films evaluations"):
        parse_options(Options, "", ["--record-video", "--eval-interval", "0"])


@pytest.mark.parametrize("value", ["inf", "1e309", "nan"])
def test_numbers_are_finite(value: str) -> None:
    module = importlib.import_module("ppo_cartpole")
    with pytest.raises(RecipeError, match="--learning-rate must be"):
        parse_options(module.Options, None, ["--learning-rate", value])


@pytest.mark.parametrize("flag", ["--seed", "--num-envs", "--minibatch-size", "--torch-threads"])
def test_numbers_have_bounds(flag: str) -> None:
    module = importlib.import_module("ppo_cartpole")
    with pytest.raises(RecipeError, match=f"{flag} must be at most"):
        parse_options(module.Options, None, [flag, "9" * 24])


def test_help_explains_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_options(Options, "What it is for.", ["--help"])
    shown = capsys.readouterr().out
    for text in (
        "What it is for.",
        "Options of every recipe:",
        "Options of a recipe for tests:",
        "--steps INT",
        "how many (default: 3)",
        "in % of the most",
        "{a,b}",
        "--record-video, --no-record-video",
        "Given anew may be",
    ):
        assert text in shown


def test_options_survive_json() -> None:
    options = Options(output_dir=Path("x/y"), goal=3.5)
    assert from_json(Options, json.loads(json.dumps(to_json(options)))) == options


def test_a_resumed_run_has_the_options_of_the_run(tmp_path: Path) -> None:
    run = saved_run(tmp_path, output_dir="elsewhere")
    options = parse_options(Options, "", ["--resume", str(run), "--workers", "8"])
    assert options == Options(steps=9, rate=0.25, workers=8, resume=run)


def test_a_resumed_run_may_be_told_what_it_has_anyway(tmp_path: Path) -> None:
    assert parse_options(Options, "", ["--resume", str(saved_run(tmp_path)), "--steps", "9"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--steps", "10"], "--steps was 9 and is 10"), (["--seed", "8"], "--seed was 0 and is 8")],
)
def test_a_resumed_run_keeps_its_options(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=f"{message}: leave them out, or start a new run"):
        parse_options(Options, "", ["--resume", str(saved_run(tmp_path)), *flags])


def test_what_a_message_says_can_be_typed_into_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a path has blanks and quotes."""
    directory = tmp_path / "my run's; $HOME"
    directory.mkdir()
    saved_run(directory)
    with pytest.raises(RecipeError) as old:
        refuse_old_run(directory)
    assert resumed(str(old.value), directory).steps == 9
    checkpoints = directory / "checkpoints"
    checkpoints.write_text("no directory")
    with pytest.raises(RecipeError, match="can't save the checkpoint") as unsaved:
        Checkpoints(checkpoints, 1).save(1, {})
    assert resumed(str(unsaved.value), directory).steps == 9
    table = Table(directory / "metrics.csv")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecipeError, match="can't be written") as unwritten:
        table.sync()
    table.close()
    assert resumed(str(unwritten.value), directory).steps == 9


def resumed(message: str, directory: Path) -> Options:
    """The options of a run that is gone on with as a message says."""
    command = message[message.index("--resume ") :].split(", or give")[0]
    words = shlex.split(command)
    assert words == ["--resume", str(directory)]
    return parse_options(Options, "", words)


def test_only_a_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="holds no run to go on with"):
        parse_options(Options, "", ["--resume", str(tmp_path)])
    with pytest.raises(RecipeError, match=r"not the configuration.*colour.*of 'r': resume"):
        parse_options(Options, "", ["--resume", str(saved_run(tmp_path, colour="red"))])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RecipeError, match=r"not the configuration.*put the file back"):
        parse_options(Options, "", ["--resume", str(tmp_path)])


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "0", "[" * 100_000, '{"options": []}', '{"options": null}']
)
def test_a_damaged_configuration(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RecipeError, match=r"not the configuration.*put the file back"):
        parse_options(Options, "", ["--resume", str(tmp_path)])


@pytest.mark.parametrize("value", [4.5, "4", True, [4], None])
def test_an_option_of_another_type(tmp_path: Path, value: object) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"--steps can't be {value!r}")):
        parse_options(Options, "", ["--resume", str(saved_run(tmp_path, steps=value))])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("starts", "x"),
        ("starts", [{}]),
        ("starts", [{"step": 0, "versions": {}, "machine": "this"}]),
        ("wandb", "x"),
        ("wandb", {}),
        ("versions", []),
        ("id", 3),
        ("recipe", [1]),
    ],
)
def test_what_else_a_configuration_holds(tmp_path: Path, name: str, value: object) -> None:
    """Nobody is to stumble over it after the imports, or at the end of a film."""
    file = saved_run(tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    said = rf"its {name} can't be {re.escape(repr(value)[:40])}.*put the file back as it was"
    with pytest.raises(RecipeError, match=said):
        parse_options(Options, "", ["--resume", str(tmp_path)])
    with pytest.raises(RecipeError, match=said):
        open_run(tmp_path)


def test_an_option_that_is_unknown_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"an option --colour, which is unknown here.*of 'r'"):
        parse_options(Options, "", ["--resume", str(saved_run(tmp_path, colour="red"))])


def test_a_configuration_that_cant_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(RecipeError, match=r"config.json can't be read: Is a directory"):
        parse_options(Options, "", ["--resume", str(tmp_path)])


def test_a_resumed_run_stays_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="stays in its directory"):
        parse_options(Options, "", ["--resume", str(saved_run(tmp_path)), "--output-dir", "b"])


def test_ignoring_versions_is_asked_for_each_time(tmp_path: Path) -> None:
    run = saved_run(tmp_path, ignore_versions=True)
    assert not parse_options(Options, "", ["--resume", str(run)]).ignore_versions


def test_an_output_directory_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"holds a run already.*--resume"):
        parse_options(Options, "", ["--output-dir", str(saved_run(tmp_path))])


def test_a_run_without_its_configuration_is_not_said_to_go_on(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    (run / "config.json").write_text("{")
    with pytest.raises(
        RecipeError, match=r"config\.json is damaged .*or give another --output-dir$"
    ):
        parse_options(Options, "", ["--output-dir", str(run)])


def test_learners_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RecipeError, match="--shards 8 can't be shared out equally among 3 learn"):
        Options(shards=8).check_learners(3)
    Options(shards=8).check_learners(4)
    options = importlib.import_module("ppo_cartpole").Options(minibatch_size=100)
    options.check_learners(1)  # whose last minibatch may be smaller
    with pytest.raises(RecipeError, match="--minibatch-size 100 does not fit"):
        options.check_learners(2)


def test_differences_name_what_may_not_change() -> None:
    saved = to_json(Options(steps=1, workers=5))
    assert differences(saved, Options()) == ["--steps was 1 and is 3"]


SOURCES = {
    "a2c_atari": {  # Mnih et al. 2016, Kostrikov
        "num_envs": 16,
        "sync_interval": 5,
        "total_frames": 10_000_000,
        "learning_rate": 7e-4,
        "gae_lambda": 1.0,
        "critic_coefficient": 0.5,
    },
    "ppo_atari": {  # Schulman et al. 2017, with the losses of CleanRL
        "num_envs": 8,
        "sync_interval": 128,
        "total_frames": 10_000_000,
        "learning_rate": 2.5e-4,
        "gae_lambda": 0.95,
        "epochs": 3,
        "minibatch_size": 256,
        "clip_epsilon": 0.1,
        "critic_coefficient": 0.25,
    },
    "ppo_football": {  # Liu, Yeh and Schwing 2020
        "num_envs": 16,
        "sync_interval": 128,
        "total_frames": 5_000_000,
        "learning_rate": 3.43e-4,
        "gamma": 0.993,
        "epochs": 2,
        "clip_epsilon": 0.08,
    },
}


@pytest.mark.parametrize("recipe", SOURCES)
def test_the_defaults_are_those_of_their_sources(recipe: str) -> None:
    """Whichever of the classes that a recipe's options come from says so."""
    options = parse_options(importlib.import_module(recipe).Options, "", [])
    expected = SOURCES[recipe]
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    "flags",
    [["--jobs", "0"], ["--total-frames", "-1"], ["--learning-rates", "-1"]],
)
def test_numbers_of_a_study_that_make_no_sense(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("", flags)
    assert f"error: argument {flags[0]}: " in capsys.readouterr().err
