"""The benchmarks run, and say what they have measured."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from script_paths import BENCHMARKS
from scripts import run_script

pytest.importorskip("ale_py")
pytest.importorskip("matplotlib")
import _readme
import games
import throughput
from _environments import VARIATIONS, SleepEnv
from _machine import essentials
from _report import draw_variation
from _workloads import CORES
from matplotlib.figure import Figure

README = Path(__file__).parents[2] / "README.md"
ROW_WORDS = {f"| {row.words}" for row in _readme.ROWS}

pytestmark = pytest.mark.usefixtures("warm_servers")


def run(script: str, *flags: str) -> str:
    return run_script(script, *flags)[0]


def test_throughput(tmp_path: Path) -> None:
    flags = "--workloads cartpole --trainings a2c5 --num-envs 2 4 --seconds 0.2 --repetitions 1"
    milliseconds = {"emulator_s": 0.001, "inference_s": 0.002, "learning_s": 0.001}
    used = {"executors_cpu_s": 0.002, "actors_cpu_s": 0.001, "learner_cpu_s": 0.004}
    results = {
        "parts": {"runs": [milliseconds]},
        "parts-together": {"runs": [milliseconds] * 2},
        "hts": {"steps_per_second": 100.0, "stolen_share": 0.25, **used},
        "multi-sync": {"steps_per_second": 50.0},
    }
    cell = {"workload": "cartpole", "training": "a2c5", "repetition": 0}
    known = [
        {**cell, "num_envs": num_envs, "contender": contender, **result}
        for num_envs in (2, 4)
        for contender, result in results.items()
        if (num_envs, contender) != (2, "hts")
    ]
    failed = {**cell, "num_envs": 2, "contender": "hts", "error": "killed"}
    conditions = {**essentials(), "learner_threads": None, "seconds": 0.2, "warm_up": 3}
    conditions["keep_large_blocks"] = False
    conditions["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY")
    file = tmp_path / "measurements.json"
    report = {"machine": {}, "conditions": conditions, "records": [failed, *known]}
    file.write_text(json.dumps(report))
    contenders = "--contenders hts multi-sync --output-dir"
    printed = run("throughput.py", *flags.split(), *contenders.split(), str(tmp_path))
    assert "cartpole, A2C, unroll of 5 steps, 4 environments" in printed
    assert f"by that {CORES} cores make {CORES * 250} steps/s" in printed
    (row,) = (
        line for line in printed.split("4 environments")[1].splitlines() if line[:6] == "  hts "
    )
    assert row.split() == ["hts", *["100"] * 3, *[f"{0.4 / CORES:.0%}"] * 2, "2.00"]
    assert "hts, ms of CPU per step: executors 2.000, actors 1.000, learner 4.000" in printed
    records = json.loads(file.read_text())["records"]
    assert records[:-1] == known
    measured = records[-1]  # what was missing, since it had failed
    assert (measured["contender"], measured["num_envs"]) == ("hts", 2)
    assert measured["steps_per_second"] > 0
    assert all(measured[part] > 0 for part in used)
    assert 0 <= measured["stolen_share"] < 1
    assert 50 < measured["memory_mib"] < 5_000
    assert (measured["threads"], measured["batch"]) == (1, [2, 5])
    assert "of the learner, environments x steps of a batch: hts 1, 2 x 5\n" in printed
    two, four = printed.split("4 environments")
    assert f"{measured['memory_mib']:,.0f}\n" in two.split("MiB in all\n")[1]
    assert "MiB in all" not in four, "nothing is known of it"
    assert "time of the cores that the host gave to others: hts 25% (25%-25%)\n" in four
    for picture in ("throughput.svg", "scaling.svg"):
        assert "</svg>" in (tmp_path / picture).read_text()


def test_one_run_at_a_time_writes_measurements(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    try:
        command = [sys.executable, str(BENCHMARKS / "throughput.py"), "--output-dir", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    finally:
        os.close(directory)
    assert done.returncode == 1
    assert done.stderr == f"error: another run writes to {tmp_path}\n"
    assert not list(tmp_path.iterdir())


def test_measurements_that_fail_are_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: list[str], limit_s: float) -> dict[str, Any]:
        return {"error": "killed"} if "multi-sync" in arguments else {"steps_per_second": 123.0}

    monkeypatch.setattr(throughput, "run_alone", run)
    monkeypatch.setattr(throughput, "run_together", lambda *_: [{"error": "no game"}] * 2)
    monkeypatch.setattr(throughput, "keep_others_out", lambda _: None)  # until this process ends
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    flags = "--workloads cartpole --repetitions 1 --contenders hts multi-sync --output-dir"
    monkeypatch.setattr(sys, "argv", ["throughput.py", *flags.split(), str(tmp_path)])
    for _ in range(2):  # what has failed is tried again
        with pytest.raises(SystemExit, match="3 of 4 measurements failed"):
            throughput.main()
        printed = capsys.readouterr()
        assert "multi-sync: killed" in printed.out
        assert "parts, 1]" in printed.err


def test_a_directory_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for directory in ("file", "file/below"):
        argv = ["throughput.py", "--output-dir", str(tmp_path / directory)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit, match=r"can't be made: .*; name a directory"):
            throughput.main()


def test_numbers_of_environments_are_of_workloads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--num-envs", "64"])
    with pytest.raises(SystemExit):
        throughput.parse()
    assert "are of --workloads: name some" in capsys.readouterr().err
    flags = ["--num-envs", "64", "--workloads", "cartpole", "--contenders", "hts"]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *flags])
    assert throughput.parse().num_envs == [64]


def test_who_knows_no_device_is_measured_on_the_cpu_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for others in (["--contenders", "hts", "async-batched"], ["--readme"]):
        monkeypatch.setattr(sys, "argv", ["throughput.py", "--device", "cuda", *others])
        with pytest.raises(SystemExit):
            throughput.parse()
        assert "are measured on the CPU alone" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--device", "cuda"])
    assert "async-batched" not in throughput.parse().contenders


def test_parts_are_timed_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(throughput, "run_alone", lambda *_: {"steps_per_second": 1.0})
    flags = ["--workloads", "cartpole", "--contenders", "hts", "--policy-device", "cuda"]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *flags, "--repetitions", "1"])
    options = throughput.parse()
    cells, _ = throughput.asked_for(options)
    found = throughput.Measurements(tmp_path / "all.json", {})
    throughput.measure(options, cells, False, found, found)
    assert [each["contender"] for each in found.records] == ["hts"]


def test_the_readmes_table_is_measured_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what is installed; the rows are those that the README shows."""
    speeds = {"hts": 300.0, "multi-async": 100.0, "multi-sync": 50.0, "loop-ale": 200.0}
    speeds |= {"loop-vector": 10.0}

    def run(arguments: list[str], limit_s: float) -> dict[str, Any]:
        assert {os.environ[name] for name in throughput.KEEP_BLOCKS} == {str(1 << 30)}
        if "serial" in arguments:
            return {"error": "killed"}
        (contender,) = {*arguments} & {*speeds}
        return {"steps_per_second": speeds[contender]}

    monkeypatch.setattr(throughput, "run_alone", run)
    monkeypatch.setattr(throughput, "run_together", lambda *_: [{"error": "left out"}])
    monkeypatch.setattr(throughput, "lacking", lambda: {"sb3", "sample-factory", "loop-envpool"})
    monkeypatch.setattr(_readme, "find_spec", lambda _: None)
    monkeypatch.setattr(throughput, "keep_others_out", lambda _: None)  # until this process ends
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    for name in throughput.KEEP_BLOCKS:
        monkeypatch.setenv(name, "0")
    flags = ["--readme", "--repetitions", "1", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *flags])
    with pytest.raises(SystemExit, match="9 of 23 measurements failed"):  # those left out
        throughput.main()
    printed = capsys.readouterr().out
    assert "vector_instructions: " in printed
    assert "numpy_blas_kernels: " in printed
    table = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")][2:]
    shown = [line.split(" | ") for line in README.read_text().splitlines() if " | " in line]
    assert [row[0] for row in table] == [row[0] for row in shown if row[0] in ROW_WORDS]
    assert table[0][1:] == ["300", "3.00", "1.50 (loop-ale) |"]
    assert table[2][1] == "not measured"
    assert table[4][1:] == ["300", "3.00", "3.00 |"]
    who = dict(line[2:].split(": ", 1) for line in printed.splitlines() if line[:2] == "- ")
    assert [f"| {words}" for words in who] == [row[0] for row in table]
    costless = who["environments that cost nothing, collecting only"]
    assert costless == (
        "measured: multi-async, multi-sync, loop-vector; failed: serial; not installed: sb3"
    )
    assert who["football, PPO, 4 epochs"] == "not measured: multi-async, multi-sync"


def test_ctrl_c_shows_what_has_been_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: list[str], limit_s: float) -> dict[str, float]:
        if "multi-sync" in arguments:
            raise KeyboardInterrupt
        return {"steps_per_second": 123.0}

    monkeypatch.setattr(throughput, "run_alone", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    flags = "--workloads sleep --contenders hts multi-sync --output-dir"
    monkeypatch.setattr(sys, "argv", ["throughput.py", *flags.split(), str(tmp_path)])
    with pytest.raises(SystemExit, match="the same command goes on"):
        throughput.main()
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  hts"))
    assert row.split()[:2] == ["hts", "123"]


def test_the_front_pages_picture_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "timeline.svg"
    printed, _ = run_script("timeline.py", str(file))
    assert printed == f"drawn: {file}\n"
    picture = file.read_text()
    for text in ("learner", "environment 5", "round 14"):  # updates are named where there is room
        assert f"<!-- {text} -->" in picture


def test_processes_and_threads_are_measured_side_by_side() -> None:
    flags = ("--envs", "2", "--mean-ms", "1", "--rounds", "1", "--turns", "1")
    *_, processes, threads = run("waiting_environments.py", *flags).splitlines()
    for line, kind in ((processes, "processes"), (threads, "threads")):
        _, number, place, *figures, _ = line.split("|")
        assert (number.strip(), place.strip()) == ("2", kind)
        assert all(float(figure.replace(",", "")) > 0 for figure in figures)


@pytest.mark.parametrize("times", ["exponential", "constant", "gamma", "lognormal", "straggler"])
def test_environments_sleep_as_long_as_they_say(times: str) -> None:
    means, variations = [], []
    for index in (0, 1):
        env = SleepEnv(index, times, mean_s=0.002)
        slept = [env.draw_s() for _ in range(20_000)]
        means.append(fmean(slept))
        variations.append(stdev(slept) / means[-1])
    expected = [0.010, 0.002] if times == "straggler" else [0.002, 0.002]
    assert means == pytest.approx(expected, rel=0.15)
    known = VARIATIONS.get(times, 1.0)
    assert variations == pytest.approx([known, known], rel=0.3)


def test_speed_is_drawn_against_the_variation_of_step_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    cell = {"training": "collect", "num_envs": 2, "contender": "hts", "repetition": 0}
    speeds = {"sleep": 150.0, "sleep-straggler": 50.0, "sleep-constant": 180.0, "pong": 70.0}
    records = [
        {**cell, "workload": workload, "steps_per_second": speed}
        for workload, speed in speeds.items()
    ]
    assert not draw_variation(records[:2], Path("variation.svg"))  # one point is no line
    assert draw_variation(records, Path("variation.svg"))
    (axes,) = figures[0].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert [*lines["ideal"].get_ydata()] == [200.0, 200.0]
    (hts,) = (line for line in axes.get_lines() if line.get_marker() == "o")
    assert [*zip(*hts.get_data(), strict=True)] == [(0.0, 180.0), (1.0, 150.0)]


def test_theory_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    known = {"num_envs": 2, "alpha": 2, "lag": 0, "num_executors": 2, "steps_per_second": 123.0}
    known |= {"measured": 0.5, "recorded": 0.6, "iid": 0.6, "barrier": 0.7}
    file = tmp_path / "theory.json"
    file.write_text(json.dumps({"env_id": "sleep", "points": [known]}))
    flags = "--num-envs 2 --alpha 2 --lag 0 1 --mean-ms 1 --seconds 0.001 --rounds 3 --output-dir"
    printed = run("theory_check.py", *flags.split(), str(tmp_path))
    assert "| 2 | 2 | 0 | 0.500 | 0.600 | 0.600 | 0.700 | 123 |" in printed
    first, second = json.loads(file.read_text())["points"]
    assert first == known
    assert (second["lag"], second["rounds"]) == (1, 3)
    assert 0 < second["measured"] <= second["recorded"] * 1.001, "nobody is faster than the rules"
    assert "<svg" in (tmp_path / "theory.svg").read_text()
    others = ("--seconds", "9", "--output-dir", str(tmp_path))
    message = run_script("theory_check.py", *others, code=2)[1]
    assert "was measured with --seconds 0.001" in message
    other = ["--num-envs", "4", "--alpha", "4", "--lag", "1"]  # of which there is no lag 0
    run("theory_check.py", *other, *flags.split()[6:], str(tmp_path))


def test_games_go_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with what failed; HTSCollector with another lag is none of the others."""
    speeds = {"hts": 300.0, "hts-lag2": 900.0, "multi-sync": 200.0}
    asked: list[str] = []

    def run_alone(arguments: list[str], limit_s: float) -> dict[str, Any]:
        contender, *work = arguments[arguments.index("--alone") + 1 :]
        assert work == ["ALE/Pong-v5", "a2c5", "16"]
        asked.append(contender)
        first = asked.count(contender) == 1
        if contender == "multi-sync" and first:
            return {"error": "killed"}
        return {"steps_per_second": speeds[contender]}

    monkeypatch.setattr(games, "run_alone", run_alone)
    monkeypatch.setattr(games, "STEPS", 20)
    monkeypatch.setattr(games, "keep_others_out", lambda _: None)  # until this process ends
    flags = ["--games", "Pong", "--contenders", *speeds, "--repetitions", "1", "--output-dir"]
    flags.append(str(tmp_path))
    said = "error: 1 measurements failed; the same command tries them again"
    _, told = run_script("games.py", *flags, code=said)
    assert "multi-sync: killed" in told
    printed = run("games.py", *flags)
    assert asked == [*speeds, "multi-sync"]
    assert "| 300 (300-300) | 900 (900-900) | 200 (200-200) | 1.50 |" in printed
    assert "</svg>" in (tmp_path / "games.svg").read_text()
    said = "error: .* was measured with seconds 10.0, and this would be with seconds 1.0"
    monkeypatch.setattr(sys, "argv", ["games.py", *flags, "--seconds", "1"])
    with pytest.raises(SystemExit, match=said):
        games.main()
