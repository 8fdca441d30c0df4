"""The benchmarks run, and say what they have measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ale_py")
pytest.importorskip("matplotlib")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(script: str, *flags: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_throughput(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = "--workloads costless --contenders hts --seconds 0.2 --repetitions 1 --json"
    printed = run("throughput.py", *flags.split(), str(file))
    assert "costless: 16 environments, alpha 20" in printed
    (measured,) = json.loads(file.read_text())["results"]["costless"]["hts"]
    assert measured["steps_per_second"] > 0


def test_games_go_on_with_what_is_missing(tmp_path: Path) -> None:
    known = {"step_ms": 1.0, "step_std_ms": 0.5, "speeds": {"hts": [300.0], "multi-sync": [200.0]}}
    file = tmp_path / "games.json"
    file.write_text(json.dumps({"results": {"Pong": known}}))
    flags = "--games Pong,Freeway --contenders hts --seconds 0.2 --repetitions 1 --output-dir"
    printed = run("games.py", *flags.split(), str(tmp_path))
    assert "| Pong | 1.00 (0.50) | 300 (300-300) | 1.50 |" in printed
    results = json.loads(file.read_text())["results"]
    assert results["Pong"] == known
    assert results["Freeway"]["speeds"]["hts"][0] > 0
    assert (tmp_path / "games.png").read_bytes().startswith(b"\x89PNG")


def test_learning_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    known = "elapsed_s,steps,return_mean\n60.0,32,-20.5\n120.0,64,-19.5\n"
    (tmp_path / "hts-seed0.csv").write_text(known)
    flags = "--contenders hts multi-sync --num-envs 2 --sync-interval 16 --total-frames 64"
    printed = run("learning.py", *flags.split(), "--output-dir", str(tmp_path))
    assert "| HTSCollector, lag 1 | 2.0 | 1 | -19.5 | -19.5 |" in printed
    assert (tmp_path / "hts-seed0.csv").read_text() == known
    rows = (tmp_path / "multi-sync-seed0.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["steps", "32", "64"]
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
