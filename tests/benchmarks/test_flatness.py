"""Whether a long run stays as it begins is told of runs that go on to their end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from script_paths import BENCHMARKS
from scripts import run_script

pytest.importorskip("ale_py")
pytest.importorskip("matplotlib")
import flatness

pytestmark = pytest.mark.usefixtures("warm_servers")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_flatness_watches_a_run_to_its_end(tmp_path: Path) -> None:
    # So many steps that a machine with 200,000 a second gives ten samples of its workers.
    options = ("--steps", "100000", "--interval", "0.05", "--output-dir", str(tmp_path))
    printed, _ = run_script("flatness.py", *options)
    assert "| main process, descriptors |" in printed
    assert "| steps per second |" in printed
    header, *rows = (tmp_path / "processes.csv").read_text().splitlines()
    assert header == "elapsed_s,pid,memory_mib,descriptors,name"
    names = {row.split(",")[-1] for row in rows}
    assert names >= {"worker server", "executor 0", "actor 0"}
    assert len({row.split(",")[1] for row in rows}) >= 5, "main, two servers, workers"
    assert "</svg>" in (tmp_path / "flatness.svg").read_text()
    assert subprocess.run(
        [sys.executable, str(BENCHMARKS / "flatness.py"), "--pid", "999999999"],
        capture_output=True,
        check=False,
    ).stderr.endswith(b"error: there is no process 999999999\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("os.kill(os.getpid(), 9)", "the run ended by itself with exit code -9"),
        ("sys.exit(3)", "the run ended by itself with exit code 3"),
        ("sys.exit()", "the run ended after 70 of 100 steps"),
    ],
)
def test_flatness_tells_of_a_run_that_ends_before_its_time(
    does: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def fake(command: list[str]) -> subprocess.Popen[bytes]:
        Path(command[-1]).write_text("step,time/elapsed_s\n0,0.0\n70,1.0\n")
        return start([sys.executable, "-c", f"import os, sys, time; time.sleep(0.5); {does}"])

    monkeypatch.setattr(flatness.subprocess, "Popen", fake)
    flags = ("--steps", "100", "--interval", "0.1", "--output-dir", str(tmp_path))
    assert run_script("flatness.py", *flags, code=1)[1] == f"error: {said}\n"


def test_flatness_takes_metrics_of_a_run_that_it_is_told_of() -> None:
    told = run_script("flatness.py", "--metrics", "metrics.csv", code=2)[1]
    assert told.endswith("--metrics are of the run of --pid, which is not given\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--metrics /nope.csv", "--metrics /nope.csv: there is no such file"),
        ("--interval -1", "argument --interval: expected a number above 0, got '-1'"),
        ("--minutes nan", "argument --minutes: expected a number above 0, got 'nan'"),
    ],
)
def test_flatness_says_what_it_can_not_watch(flags: str, said: str) -> None:
    _, told = run_script("flatness.py", "--pid", "999999999", *flags.split(), code=2)
    assert told.endswith(f"{said}\n")


def test_a_process_that_held_nothing_at_first(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [flatness.Sample(at, 1, memory, 3, "a") for at, memory in ((0.0, 0.0), (0.1, 4.7))]
    flatness.report(samples, [], 1)
    assert "| main process, MiB | 0.0 | 4.7 | - |" in capsys.readouterr().out
