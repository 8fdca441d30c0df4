"""The benchmarks of football run, and say what they have measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from football_engines import ENGINES, need

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(script: str, *flags: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_step_times(tmp_path: Path) -> None:
    need("envpool")
    flags = "--scenarios academy_empty_goal_close --engine envpool --steps 300 --bootstrap 5"
    printed = run("football_steps.py", *flags.split(), "--output-dir", str(tmp_path))
    assert "| academy_empty_goal_close | " in printed
    report = json.loads((tmp_path / "football_steps.json").read_text())
    result = report["results"]["academy_empty_goal_close"]
    assert result["steps"] == 300
    assert 0 < result["mean_s"] <= result["percentile_99_s"]
    for check in (result["gamma_of_steps"], result["gamma_with_resets"]):
        assert check["sums"] == 3
        assert 0 < check["p_value"] <= 1
    assert sum(result["gamma_of_steps"]["sums_s"]) == pytest.approx(300 * result["mean_s"])
    assert (tmp_path / "football_steps.png").read_bytes().startswith(b"\x89PNG")


def test_engines_side_by_side() -> None:
    need(*ENGINES)
    printed = run("football_engines.py", "--scenarios", "academy_empty_goal", "--steps", "60")
    name, differ, *_ = printed.splitlines()[-1].strip("| ").split(" | ")
    assert (name, differ) == ("academy_empty_goal", "0")
