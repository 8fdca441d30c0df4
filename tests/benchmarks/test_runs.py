"""Runs of recipes side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import script_paths  # noqa: F401  so that the scripts are found

pytest.importorskip("matplotlib")
import runs


def run(directory: Path, returns: list[float | str], evaluation: float) -> None:
    directory.mkdir()
    lines = [f"{100 * number},{value}" for number, value in enumerate(returns, 1)]
    (directory / "metrics.csv").write_text("\n".join(["step,episode/return_mean", *lines, ""]))
    (directory / "evaluations.csv").write_text(
        f"step,evaluation/return_mean\n200,{evaluation + 7}\n300,{evaluation}\n"
    )


def test_groups_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "with-0", ["nan", 40, 90], 100)
    run(tmp_path / "with-1", [20, 60, 50], 80)
    run(tmp_path / "without-0", [10, 20], 30)
    groups = [f"{name}={tmp_path}/{name}-*" for name in ("with", "without")]
    picture = tmp_path / "runs.svg"
    assert runs.main([str(picture), *groups, "--title", "A title", "--goal", "55"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| runs | last 100 training episodes | last evaluation | best evaluation | steps to 55 |",
        "| --- | --- | --- | --- | --- |",
        "| with, 2 | 70 (50 to 90) | 90 (80 to 100) | 97 (87 to 107) | 300, 200 |",
        "| without, 1 | 20 (20 to 20) | 30 (30 to 30) | 37 (37 to 37) | never |",
    ]
    assert "<svg" in picture.read_text()


def test_small_returns_have_decimals() -> None:
    assert runs.spread([-1.234, 3.0, 2.5]) == "2.50 (-1.23 to 3.00)"


@pytest.mark.parametrize(
    ("group", "message"),
    [("with", "names no directory: write NAME=PATTERN"), ("here={}", "holds no run: there is no")],
)
def test_what_is_no_run(group: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        runs.main([str(tmp_path / "runs.svg"), group.format(tmp_path)])
