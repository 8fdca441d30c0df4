"""The recipe of docs/how_to/play_and_replay.md: trained, played and replayed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from recipe_runs import start
from replaying import play, replay
from script_paths import RECIPES, ROOT

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("nothing_left")

TEXT = (ROOT / "docs" / "how_to" / "play_and_replay.md").read_text()


@pytest.mark.timeout(600)  # a start from nothing, on a machine that may be busy
def test_the_recipe_that_the_documentation_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, directory = tmp_path / "reinforce.py", tmp_path / "run"
    (code,) = re.findall(r'```python\n("""REINFORCE.*?)```', TEXT, re.DOTALL)
    script.write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(RECIPES)]))
    flags = "--total-frames 1536 --log-interval 256 --checkpoint-interval 512"
    flags += " --eval-interval 768 --eval-episodes 2"
    process = start(f"{script} {flags}", "--output-dir", str(directory))
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    monkeypatch.setattr(sys, "path", [*sys.path])  # which both scripts add to
    try:
        output = play(directory, "--recipe", script)
        assert "reinforce on CartPole-v1: best.pt, after" in output
        assert "bit for bit what the run's own evaluation gave" in output
        output = replay(directory, "--round", 4, "--env", 5, "--recipe", script)
        assert "reinforce on CartPole-v1, from step-000000000512.pt" in output
        assert "the same as in the run, bit for bit: rows of metrics.csv (" in output
    finally:
        sys.modules.pop("reinforce", None)
