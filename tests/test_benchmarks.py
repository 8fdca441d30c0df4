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


def test_theory_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    known = {"num_envs": 2, "alpha": 2, "lag": 0, "num_executors": 2, "steps_per_second": 123.0}
    known |= {"measured": 0.5, "recorded": 0.6, "iid": 0.6, "barrier": 0.7}
    file = tmp_path / "theory.json"
    file.write_text(json.dumps({"env_id": "sleep", "points": [known]}))
    flags = "--num-envs 2 --alpha 2 --lag 0 1 --mean-ms 1 --seconds 0 --rounds 3 --output-dir"
    printed = run("theory_check.py", *flags.split(), str(tmp_path))
    assert "| 2 | 2 | 0 | 0.500 | 0.600 | 0.600 | 0.700 | 123 |" in printed
    first, second = json.loads(file.read_text())["points"]
    assert first == known
    assert (second["lag"], second["rounds"]) == (1, 3)
    assert 0 < second["measured"] <= second["recorded"] * 1.001, "nobody is faster than the rules"
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")


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
