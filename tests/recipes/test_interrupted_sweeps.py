"""Sweeps that are stopped, killed or moved, and go on."""

from __future__ import annotations

import os
import signal

import pytest
from small_sweeps import Sweeps
from support.errors import RecipeError


def test_an_interrupted_sweep_goes_on_with_the_run_that_was_under_way(
    sweep: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.draw(4, 3)
    assert sweep.run(3) == 130
    assert "stopped in trial-0001; the same command goes on" in capsys.readouterr().out
    assert (sweep.directory / "trial-0001" / "saved").exists()
    assert sweep.run(2) == 0
    study = sweep.study()
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert study.trials[2].intermediate_values == {1: 7, 2: 8}
    assert {path.name for path in sweep.directory.iterdir() if path.is_dir()} == {
        "trial-0000", "trial-0001",
    }  # fmt: skip


def test_a_signal_that_is_ignored_stays_so(sweep: Sweeps) -> None:
    """As SIGHUP is under nohup: a sweep outlives its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sweep.draw(4)
    assert sweep.run(1) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert callable(signal.getsignal(signal.SIGTERM))


def test_a_sweep_that_was_killed_goes_on_with_its_run(sweep: Sweeps) -> None:
    """Twice: the study is all that it has left, the trial in it as if under way."""
    sweep.draw(4)
    study = sweep.study()
    (sweep.directory / "trial-0000").mkdir()
    (sweep.directory / "trial-0000" / "config.json").write_text("{}")
    for _ in range(2):
        study.ask({"x": sweep.space()})
        study = sweep.study()
    assert sweep.run(1) == 0
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL", "COMPLETE"]
    assert study.trials[2].intermediate_values == {1: 7, 2: 8}, "it has begun anew"


@pytest.mark.parametrize("draws", [(), (5,)], ids=["empty", "with a trial to come"])
def test_runs_of_another_study_are_refused(sweep: Sweeps, draws: tuple[int, ...]) -> None:
    sweep.draw(4)
    assert sweep.run(1) == 0
    file, kept = sweep.directory / "study.db", sweep.directory / "kept.db"
    file.rename(kept)
    run, away = sweep.directory / "trial-0000", sweep.directory / "away"
    run.rename(away)
    sweep.draw(*draws)
    away.rename(run)
    for _ in range(2):  # nothing has begun meanwhile
        with pytest.raises(RecipeError, match=r"study\.db knows no run trial-0000, .*put back"):
            sweep.run(1)
    kept.rename(file)
    assert sweep.run(1) == 0
    assert [trial.params["x"] for trial in sweep.study().trials] == [4]
    file.unlink()
    run.rename(away)
    sweep.draw(4)
    assert sweep.run(1) == 0


class Last:
    """Sends this process a signal as it goes: what the handler raises there is lost."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_between_two_trials_ends_the_sweep(
    sweep: Sweeps, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("support.sweep_study.draw", lambda *_: Last() and None)
    sweep.draw(4, 4)
    assert sweep.run(2) == 130
    assert capsys.readouterr().out.endswith("\nstopped; the same command goes on\n")
    assert [trial.state.name for trial in sweep.study().trials] == ["COMPLETE", "WAITING"]
