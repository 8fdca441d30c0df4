"""The benchmarks of several learners keep what was measured, and tell of what went wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import script_paths  # noqa: F401  so that the scripts are found
import torch

pytest.importorskip("matplotlib")
import learner_kills
import learner_scaling
from scripts import run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

NAMES = ("step_s", "update_s", "exchange_s", "large_exchange_s")
MEASURED = dict.fromkeys((*NAMES, *(f"{kind}_s" for kind in learner_scaling.KINDS)), 0.01)


def test_runs_that_were_finished_are_kept_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def measure(size: int, shards: int, options: Any, on_hosts: bool) -> dict[str, Any]:
        asked.append((size, shards))
        if asked.count((2, 4)) == 1 and size == 2 and shards == 4:
            return {"error": "a learner has failed"}
        return {**MEASURED, "steps_per_second": 900.0 * size, "rows": 3.0, "num_values": 1000}

    monkeypatch.setattr(learner_scaling, "measure", measure)
    monkeypatch.setattr(learner_scaling, "keep_others_out", lambda _: None)  # until this one ends
    flags = ("--learners", "1", "2", "--turns", "1", "--output-dir", str(tmp_path))
    said = "error: 1 runs failed; the same command tries them again"
    run_script("learner_scaling.py", *flags, code=said)
    assert asked == [(1, 0), (2, 0), (1, 4), (2, 4)]
    printed, _ = run_script("learner_scaling.py", *flags)
    assert asked[4:] == [(2, 4)]
    assert "| shards | 2 | 1,800 | 1.00 |" in printed
    assert "</svg>" in (tmp_path / "learner_scaling.svg").read_text()


def test_shares_are_of_one_learner(tmp_path: Path) -> None:
    flags = ("--learners", "2", "4", "--output-dir", str(tmp_path))
    assert (
        "--learners must have 1 among them" in run_script("learner_scaling.py", *flags, code=2)[1]
    )


def leave_policy(directory: Path, value: float) -> Path:
    directory.mkdir()
    torch.save({"weight": torch.tensor([value])}, directory / "policy.pt")
    return directory


def test_other_bits_and_what_is_left_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = learner_kills.Table(2, "recipe.py", tmp_path)
    for number, value, left, wrong in [
        (1, 0.0, "nothing", 0),
        (2, 0.0, "nothing", 0),
        (3, 1.0, "nothing", 1),
        (4, 0.0, "2 processes", 2),
    ]:
        directory = leave_policy(tmp_path / f"run{number}", value)
        table.row("killed", 1.0, 0, directory, left)
        assert table.wrong == wrong
    table.row("diverges", 1.0, 1, tmp_path / "nowhere", "nothing")
    assert table.wrong == 2, "a run that fails has no policy"
    policies = [line.split(" | ")[3] for line in capsys.readouterr().out.splitlines()]
    assert policies == ["same", "same", "other", "same", "none"]


def test_there_must_be_something_to_compare_with(tmp_path: Path) -> None:
    table = learner_kills.Table(2, "recipe.py", tmp_path)
    with pytest.raises(SystemExit, match=r"left alone, a run left no policy.*exit code 1"):
        table.row("left alone", 1.0, 1, tmp_path / "nowhere", "nothing")


def test_a_host_is_cut_off_or_ends() -> None:
    assert "not allowed with" in run_script("learner_kills.py", "--cut", "--crash", code=2)[1]
