"""Runs that fail, or that a part of them fails: what they leave, and that they go on from it."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import script_paths  # noqa: F401  so that the scripts are found
import support.checkpoints
import support.metrics
from full_disks import full_disk
from module_contexts import ToModule
from processes import wait_until_gone
from recipe_runs import CARTPOLE, assert_equal_runs, rows, run, start
from support.errors import InterruptedTwice, exit_with
from support.records import Records
from support.run import Run
from support.signals import StopSignals

from torchrl_hts import Evaluator, HTSCollector
from torchrl_hts._supervision.supervisor import Supervisor

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("nothing_left")

FLAGS = f"{CARTPOLE} --total-frames 640 --log-interval 64 --eval-interval 128 --checkpoint-interval"


@pytest.fixture(scope="module")
def whole(warm_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten rounds, five evaluations and five checkpoints that nothing has disturbed."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(f"{FLAGS} 128", "--keep-checkpoints", "5", "--output-dir", str(directory))
    return directory


def checkpoints(directory: Path) -> list[int]:
    """The steps of those there are."""
    return sorted(int(path.stem[5:]) for path in (directory / "checkpoints").glob("*.pt"))


def test_what_was_learned_is_saved_where_a_logger_fails(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(self: Records, row: dict[str, float]) -> None:
        if row["step"] == 320:
            raise ValueError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(Records, "send", send)
        output = run(f"{FLAGS} 0", "--output-dir", str(tmp_path), code=1)
    assert "error: the network is down" in output
    assert checkpoints(tmp_path) == [320]
    run("ppo_cartpole.py", "--resume", str(tmp_path))
    assert_equal_runs(whole, tmp_path)


def test_stopped_at_once_in_the_middle_of_saving(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while open rounds are finished shuts the collector down: there is nothing to save."""
    saves = 0
    save = Supervisor.save

    def interrupted(self: Supervisor) -> Any:
        nonlocal saves
        saves += 1
        if saves == 3:
            raise KeyboardInterrupt
        return save(self)

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "save", interrupted)
        output = run(f"{FLAGS} 128", "--output-dir", str(tmp_path), code=130)
    assert "interrupted" in output
    assert checkpoints(tmp_path) == [128, 256]
    run("ppo_cartpole.py", "--resume", str(tmp_path))
    assert_equal_runs(whole, tmp_path)


def test_killed_before_its_first_checkpoint(whole: Path, tmp_path: Path) -> None:
    """The same two commands do for a run that was killed at any moment."""
    killed = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(killed / "checkpoints")
    (killed / "best.pt").unlink()
    name = json.loads((killed / "config.json").read_text())["id"]
    output = run("ppo_cartpole.py", "--resume", str(killed))
    assert f"there is no checkpoint in {killed} yet: the run begins anew" in output
    assert_equal_runs(whole, killed)
    assert json.loads((killed / "config.json").read_text())["id"] == name


def kill(evaluator: Evaluator) -> None:
    """Kill its process."""
    os.kill(evaluator.pid, signal.SIGKILL)
    wait_until_gone({evaluator.pid})


def test_a_run_of_another_recipe_is_left_as_it_is(tmp_path: Path) -> None:
    """Also before its first checkpoint, which would tell too."""
    config = json.dumps({"recipe": "reinforce", "options": {}})
    (tmp_path / "config.json").write_text(config)
    said = run("ppo_cartpole.py", "--resume", str(tmp_path), code=1)
    assert f"{tmp_path} is a run of 'reinforce', and this is 'ppo_cartpole': go on with" in said
    assert (tmp_path / "config.json").read_text() == config
    assert not (tmp_path / "metrics.csv").exists()


def test_evaluations_go_on_where_their_process_is_killed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = []
    submit = Evaluator.submit

    def killing(self: Evaluator, step: int) -> None:
        if len(killed) < 2:
            killed.append(self)
            kill(self)
        submit(self, step)

    monkeypatch.setattr(Evaluator, "submit", killing)
    output = run(f"{FLAGS} 128", "--output-dir", str(tmp_path))
    assert output.count("evaluations are played again in a new process: evaluator (pid") == 2
    assert killed[0] is not killed[1]
    assert_equal_runs(whole, tmp_path)


def test_a_run_goes_on_without_evaluations_that_always_fail(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three replacements; a resumed run plays what was asked for until then."""
    submit = Evaluator.submit

    def killing(self: Evaluator, step: int) -> None:
        kill(self)
        submit(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "submit", killing)
        output = run(f"{FLAGS} 128", "--output-dir", str(tmp_path))
    assert output.count("there are no more evaluations: evaluator (pid") == 1
    assert rows(tmp_path / "metrics.csv") == rows(whole / "metrics.csv")
    run("ppo_cartpole.py", "--resume", str(tmp_path))
    assert rows(tmp_path / "evaluations.csv") == rows(whole / "evaluations.csv")[:4]


@pytest.mark.parametrize("what", ["a checkpoint", "the metrics"])
def test_a_disk_that_fills_up(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """One message with what to do, from whatever can't be written first, and nothing lost."""
    broken = False

    class Os:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def fsync(self, fd: int) -> None:
            nonlocal broken
            written = Path(os.readlink(f"/proc/self/fd/{fd}")).name
            broken |= written.startswith("step-000000000256") or (
                what == "the metrics" and written == "metrics.csv"
            )
            if broken:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(support.checkpoints, "os", Os())
        patch.setattr(support.metrics, "os", Os())
        output = run(f"{FLAGS} 128", "--output-dir", str(tmp_path), code=1)
    error = next(line for line in output.splitlines() if line.startswith("error: "))
    assert "No space left on device" in error
    assert f"--resume {tmp_path}" in error
    assert "curve.png can't be written: No space left on device" in output
    assert checkpoints(tmp_path) == ([] if what == "the metrics" else [128])
    run("ppo_cartpole.py", "--resume", str(tmp_path))
    assert_equal_runs(whole, tmp_path)


@pytest.mark.parametrize("anew", [False, True], ids=["gone", "another"])
@pytest.mark.parametrize("interval", [0, 128], ids=["evaluations", "checkpoints"])
def test_a_directory_that_is_moved_in_mid_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool, interval: int
) -> None:
    """Nothing is written where it was; what is in it goes on, wherever it is."""
    record, calls = Run.record, 0
    there, moved = tmp_path / "run", tmp_path / "moved"

    def moving(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:  # in the fourth round
            there.rename(moved)
            if anew:
                there.mkdir()
        record(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "record", moving)
        output = run(f"{FLAGS} {interval}", "--output-dir", str(there), code=1)
    assert f"error: {there}, or its .lock, was moved or removed" in output
    assert f"go on with --resume {there}" in output
    assert "curve.png" not in output
    assert list(there.rglob("*")) == []
    run("ppo_cartpole.py", "--resume", str(moved))
    assert_equal_runs(whole, moved)


def test_a_file_that_may_not_grow(whole: Path, tmp_path: Path) -> None:
    """By the limit of the system itself, in a process of its own."""
    copied = shutil.copytree(whole, tmp_path / "run")
    newest = max((copied / "checkpoints").iterdir())
    size = newest.stat().st_size
    newest.unlink()
    kept = max((copied / "checkpoints").iterdir())
    content = kept.read_bytes()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    process = start("ppo_cartpole.py", "--resume", str(copied), preexec_fn=limit)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 1
    assert re.search(r"error: can't save the checkpoint .*whole, the newest is step-0*512", output)
    assert "Traceback" not in output
    assert kept.read_bytes() == content
    run("ppo_cartpole.py", "--resume", str(copied))
    assert_equal_runs(whole, copied)


def test_a_machine_without_a_place_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As replay.py needs, and films."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(SystemExit, match="1"), full_disk(0):
        exit_with(lambda: len(tempfile.mkdtemp()))
    said = capsys.readouterr().err
    assert re.match(r"error: No usable temporary directory .*: set TMPDIR to a directory", said)


def test_a_training_that_diverges_says_so(tmp_path: Path) -> None:
    flags = ["--learning-rate", "1e30", "--total-frames", "4000", "--eval-interval", "0"]
    printed = run(CARTPOLE, *flags, "--output-dir", str(tmp_path / "run"), code=1)
    assert "learning" in printed.splitlines()[-1], printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("within", [nullcontext, ToModule])
@pytest.mark.parametrize("saved", [False, True])
def test_interrupted_a_second_time(
    saved: bool, within: type[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        with within():
            raise InterruptedTwice(saved=saved)

    with pytest.raises(SystemExit) as end:
        exit_with(main)
    assert end.value.code == 130
    when = "after" if saved else "before"
    assert capsys.readouterr().err == f"error: interrupted {when} the run was saved\n"


@pytest.mark.parametrize("within", [nullcontext, ToModule])
def test_interrupted_where_no_run_is_saved(
    within: type[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As in delay_study.py."""

    def main() -> int:
        with within():
            raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        exit_with(main)
    assert end.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0.1, 10.0])
def test_a_signal_that_comes_by_two_ways_is_one_wish(
    second: signal.Signals, after_s: float
) -> None:
    """As `pkill` and torchrun both send it; Ctrl-C twice is somebody in a hurry."""
    now = iter([100.0, 100.0 + after_s])
    signals = StopSignals(lambda: False, lambda: False, clock=lambda: next(now))
    signals.take()
    try:
        signal.raise_signal(signal.SIGTERM)
        if second == signal.SIGTERM and after_s < 1:
            signal.raise_signal(second)
        else:
            with pytest.raises(InterruptedTwice):
                signal.raise_signal(second)
    finally:
        signals.give_back(ignoring_sigterm=False)
    assert signals.number == signal.SIGTERM


@pytest.mark.parametrize("saved", [False, True])
def test_a_signal_is_told_what_it_stops(saved: bool, capfd: pytest.CaptureFixture[str]) -> None:
    signals = StopSignals(lambda: True, lambda: saved)
    signals.take()
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signals.give_back(ignoring_sigterm=False)
    said = capfd.readouterr().err.strip()
    assert said.startswith(
        "stopping; the training" if saved else "stopping after this update; once"
    )
    assert ("without saving" in said) != saved


def test_a_run_that_has_ended_is_left_as_it_is(whole: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(whole, tmp_path / "run")

    def written() -> dict[Path, int]:
        kept = [copied / "policy.pt", copied / "best.pt", *(copied / "checkpoints").iterdir()]
        return {path: path.stat().st_mtime_ns for path in kept}

    before = written()
    output = run("ppo_cartpole.py", "--resume", str(copied))
    assert "this run has ended" in output
    assert written() == before
    assert_equal_runs(whole, copied)


def test_a_worker_that_dies_leaves_a_run_that_says_how_it_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told is followed."""
    state_dict = HTSCollector.state_dict
    saves = 0

    def dying(self: HTSCollector) -> Any:
        nonlocal saves
        saves += 1
        state = state_dict(self)
        if saves == 2:
            pid = self.worker_pids()["executor 0"]
            os.kill(pid, signal.SIGKILL)
            wait_until_gone({pid})
        return state

    with monkeypatch.context() as patch:
        patch.setattr(HTSCollector, "state_dict", dying)
        output = run(f"{FLAGS} 128", "--output-dir", str(tmp_path), code=1)
    advice = f"--resume {tmp_path} goes on from this run's newest checkpoint, step-000000000256.pt"
    assert advice in " ".join(output.split())
    assert "--until-error" not in output, "which would not be killed"
    run("ppo_cartpole.py", *advice.split()[:2])
    assert_equal_runs(whole, tmp_path)


def test_what_a_checkpoint_lacks_is_told_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whatever comes of telling it costs nothing that was learned."""
    state_dict, say = HTSCollector.state_dict, Run.say
    told = []

    def losing(self: HTSCollector) -> Any:
        return {**state_dict(self), "why_environments_are_lost": "one holds a socket"}

    def listening(self: Run, text: str) -> None:
        if "begins new episodes: one holds a socket" in text:
            told.append(checkpoints(tmp_path))
        say(self, text)

    monkeypatch.setattr(HTSCollector, "state_dict", losing)
    monkeypatch.setattr(Run, "say", listening)
    run(f"{FLAGS} 128", "--output-dir", str(tmp_path))
    assert told == [[128]]
