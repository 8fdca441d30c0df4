"""Learners of a recipe that differ from each other: each is told so, and early."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ppo_cartpole
import pytest
import script_paths  # noqa: F401  so that the scripts are found
from deeds import Deed
from ranks import run_ranks
from recipe_options import Options
from recipe_ranks import run_recipe
from recipe_runs import CARTPOLE
from support.errors import RecipeError
from support.learners import learners
from support.options import parse_options
from support.start import parse_or_exit
from torch import nn

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

FLAGS = f"{CARTPOLE} --num-envs 8 --shards 4 --total-frames 1024 --log-interval 128"  # 128 a round
FLAGS += " --eval-interval 384 --checkpoint-interval 256"


def test_learners_that_do_not_share_their_directory_are_told_so_at_the_start(
    tmp_path: Path,
) -> None:
    for rank in "01":
        (tmp_path / rank).mkdir()
    ended = run_recipe(2, FLAGS, "--output-dir", "run", directory=tmp_path / "{rank}")
    assert [each.code for each in ended] == [1, 1]
    for one in ended:
        assert "error: learner 1 has another " in one.said, ended
        assert "than the first: all machines need to share the --output-dir" in one.said
    assert {path.name for path in (tmp_path / "0" / "run").iterdir()} == {".lock"}
    assert [*(tmp_path / "1").iterdir()] == []


class ChangesItsPolicy(Deed):
    """A rank that changes its parameters in one of its updates, and tells nobody."""

    def prepare(self) -> None:
        if os.environ["RANK"] != str(self.rank):
            return
        clip, calls = nn.utils.clip_grad_norm_, itertools.count(1)

        def change(parameters: Iterable[nn.Parameter], *args: Any) -> Any:
            given = [*parameters]
            if next(calls) == self.count:
                nn.init.zeros_(given[0])
            return clip(given, *args)

        nn.utils.clip_grad_norm_ = change  # type: ignore[assignment]


def test_a_policy_that_is_not_everybodys_is_not_saved(tmp_path: Path) -> None:
    """It comes in round 5: policies are compared after rounds 4 and 8."""
    deed = ChangesItsPolicy(0, 1, "", 17)  # four optimizer steps are a round
    ended = run_recipe(2, FLAGS, "--output-dir", str(tmp_path), deed=deed)
    assert [each.code for each in ended] == [1, 1]
    for one in ended:
        assert "error: rank 1 has policy " in one.said, ended
    assert max((tmp_path / "checkpoints").iterdir()).name == "step-000000000512.pt"


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_directory_that_holds_a_run_is_refused_by_all_whom_nobody_ends(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is told in each case; with it torchrun ends the others, and srun doesn't."""
    (tmp_path / "run").mkdir()
    config = {"recipe": "r", "options": {}, "launch": None}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    variable = "SLURM_PROCID" if launcher == "srun" else "RANK"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank in range(2):
        monkeypatch.setenv(variable, str(rank))
        flags = ["--output-dir", str(tmp_path / "run")]
        if rank == 0 or launcher == "srun":
            with pytest.raises(RecipeError, match="holds a run already"):
                parse_options(Options, None, flags)
        else:
            parse_options(Options, None, flags)


def join(package: str) -> None:
    """Rank 1 has another version of a package."""
    version = importlib.metadata.version

    def other(name: str) -> str:
        return "0.0" if name == package else version(name)

    if os.environ["RANK"] == "1":
        importlib.metadata.version = other
    with learners(Options()):
        pass


def test_a_learner_with_another_version_of_what_is_played_is_named() -> None:
    for outcome in run_ranks(join, 2, "gymnasium"):
        assert outcome.error.startswith("WorldError: rank 1 has gymnasium 0.0, the others ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--help"], "usage:"),
        (["--num-envs", "many"], "invalid int value"),
        (["--num-envs", "0"], "--num-envs"),
    ],
)
@pytest.mark.parametrize("first_goes_on", [False, True])
def test_one_learner_of_a_machine_tells_of_options(
    flags: list[str],
    message: str,
    first_goes_on: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Another one tells of its own where the launcher does not end it meanwhile."""
    waited = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if not first_goes_on:
            sys.exit(-signal.SIGTERM)

    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as raised:
            parse_or_exit(lambda: parse_options(ppo_cartpole.Options, None, flags), wait)
        assert raised.value.code == 0 if flags == ["--help"] else raised.value.code
        text = raised.value.code if isinstance(raised.value.code, str) else ""  # Python prints it
        said.append("".join([*capfd.readouterr(), text]))
    assert message in said[0]
    asked_for_help = flags == ["--help"]
    assert (message in said[1]) == (first_goes_on and not asked_for_help)
    assert bool(said[1]) == (message in said[1])
    assert len(waited) == (not asked_for_help)
