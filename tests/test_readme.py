"""What the README shows runs as it is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_loop_runs_from_a_file_of_its_own(tmp_path: Path) -> None:
    """With fewer frames."""
    code = re.search(r"## The loop\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    short, replaced = re.subn(r"total_frames=[\d_]+", "total_frames=6_400", code[1])
    assert replaced == 1
    script = tmp_path / "loop.py"
    script.write_text(short)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    printed = re.fullmatch(r"mean return of the last 100 episodes: (\d+)\n", done.stdout)
    assert printed is not None, done.stdout
    assert int(printed[1]) > 8, "no episode of CartPole is shorter"
