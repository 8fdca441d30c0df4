"""Runs of the comparison of normalisations are as long as they are said to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import script_paths  # noqa: F401  so that the scripts are found

pytest.importorskip("matplotlib")
import normalisation
from scripts import run_script

FLAGS = "--env-ids Pendulum-v1 --seeds 0 --total-frames 3000 --output-dir"


def write_runs(directory: Path, steps: int) -> None:
    for way in normalisation.WAYS:
        (directory / f"Pendulum-v1-{way}-0.csv").write_text(f"steps,return_mean\n{steps},-7.0\n")


def test_runs_that_are_there_are_shown(tmp_path: Path) -> None:
    write_runs(tmp_path, 4096)
    printed, _ = run_script("normalisation.py", *FLAGS.split(), str(tmp_path))
    assert "| Pendulum-v1 | VecNormV2 | -7 | -7 | 0 |" in printed
    assert "</svg>" in (tmp_path / "normalisation.svg").read_text()


def test_runs_of_another_length_are_refused(tmp_path: Path) -> None:
    write_runs(tmp_path, 2048)
    file = tmp_path / "Pendulum-v1-policy-0.csv"
    said = f"error: {file} is of 2048 steps, and --total-frames 3000 makes 4096: "
    run_script(
        "normalisation.py", *FLAGS.split(), str(tmp_path), code=said + "give another --output-dir"
    )
