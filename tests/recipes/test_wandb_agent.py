"""W&B's agent runs a sweep file's recipe, and stops it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_runs import rows
from script_paths import RECIPES, ROOT

for name in ("rich", "matplotlib", "yaml"):
    pytest.importorskip(name)
pytest.importorskip("wandb.wandb_agent")


def test_an_agent_plays_a_sweep_and_stops_a_run(tmp_path: Path) -> None:
    """Its server is played by the script; what a run is told, and ends as, is the agent's own."""
    from wandb_file import run_record

    (tmp_path / "recipes").symlink_to(RECIPES)
    script = ROOT / "tests" / "support" / "sweep_agent.py"
    bin_, path = Path(sys.executable).parent, os.environ["PATH"]
    done = subprocess.run(
        [sys.executable, str(script), "recipes/sweeps/ppo_cartpole.yaml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{bin_}:{path}", "PYTHONPATH": str(ROOT)},
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ended, stopped = sorted((tmp_path / "runs" / "ppo_cartpole").iterdir(), key=lambda p: p.name)
    assert rows(ended / "metrics.csv")[-1]["step"] == "1024", "rounds of 512 steps"
    assert "About to run command: /usr/bin/env python recipes/ppo_cartpole.py" in done.stderr
    assert f"stopped; go on with --resume {stopped.relative_to(tmp_path)}" in " ".join(
        done.stdout.split()
    )
    assert list((stopped / "checkpoints").glob("*.pt"))
    for run in ("first", "second"):
        (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{run}.wandb")
        record = run_record(file)
        assert (record.run_id, record.sweep_id) == (run, "sweep")
