"""The rows of metrics, and their file."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
import script_paths  # noqa: F401  so that the scripts are found
from full_disks import full_disk
from support.errors import RecipeError, exit_with
from support.metrics import Table, curve

ROWS = [{"step": 10 * i, "loss/critic": 0.1 * i} for i in range(1, 4)]


def written(path: Path) -> bytes:
    table = Table(path)
    for row in ROWS:
        table.append(row)
    table.close()
    return path.read_bytes()


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_a_table_goes_on_where_its_run_does(tmp_path: Path, keep: int) -> None:
    whole = written(tmp_path / "whole.csv")
    written(tmp_path / "cut.csv")
    table = Table(tmp_path / "cut.csv", keep=keep)
    assert table.rows == ROWS[:keep]
    for row in ROWS[keep:]:
        table.append(row)
    table.close()
    assert (tmp_path / "cut.csv").read_bytes() == whole


def test_rows_of_other_metrics_are_refused(tmp_path: Path) -> None:
    content = written(tmp_path / "table.csv")
    table = Table(tmp_path / "table.csv", keep=3)
    with pytest.raises(RecipeError, match=r"these differ: loss/actor\. Give NaN"):
        table.append({**ROWS[0], "loss/actor": 1.0})
    table.close()
    assert (tmp_path / "table.csv").read_bytes() == content


def test_rows_that_are_missing_are_told_of_and_none_is_lost(tmp_path: Path) -> None:
    content = written(tmp_path / "table.csv")
    with pytest.raises(RecipeError, match="has 3 rows, and the checkpoint is of 5: put the file"):
        Table(tmp_path / "table.csv", keep=5)
    assert (tmp_path / "table.csv").read_bytes() == content
    with pytest.raises(RecipeError, match="has 0 rows"):
        Table(tmp_path / "gone.csv", keep=5)


def test_a_table_that_is_cut_off_or_damaged_is_left_as_it_is(tmp_path: Path) -> None:
    content = written(tmp_path / "table.csv")
    damaged = [
        content.replace(b"20,", b"2x,"),
        content.replace(b"20,", b"20,1,"),
        b"\xff" + content,
    ]
    damaged += [content.replace(b"20,", b""), *(content[:end] for end in range(len(content)))]
    for broken in damaged:
        path = tmp_path / "table.csv"
        path.write_bytes(broken)
        with pytest.raises(RecipeError, match="put the file back as it was"):
            Table(path, keep=3)
        assert path.read_bytes() == broken


def test_a_disk_that_fills_up_is_told_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Closing meets it a second time, since half a row is left to be written."""
    file = tmp_path / "metrics.csv"

    def main() -> int:
        with contextlib.ExitStack() as closing:
            table = Table(file)
            closing.callback(table.close)
            table.append(ROWS[0])
            table.append({**ROWS[1], "loss/critic": "1" * 100_000})  # type: ignore[dict-item]
        return 0

    with pytest.raises(SystemExit, match="1"), full_disk(50_000):
        exit_with(main)
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file} can't be written: File too large.")
    assert f"--resume {tmp_path}" in said


def rows_of(name: str, *values: float) -> list[dict[str, float]]:
    return [{"step": 1000.0 * (i + 1), name: value} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("training", "evaluation", "labels"),
    [
        ((20.0, 30.0), (), ["training, mean of the last 100 episodes"]),
        ((math.nan, math.nan), (30.0,), ["evaluation"]),
        ((20.0,), (30.0,), ["training, mean of the last 100 episodes", "evaluation"]),
    ],
)
def test_the_curves_legend_is_of_what_is_drawn(
    training: tuple[float, ...], evaluation: tuple[float, ...], labels: list[str]
) -> None:
    (axes,) = curve(
        "",
        rows_of("episode/return_mean", *training),
        rows_of("evaluation/return_mean", *evaluation),
    ).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == labels


@pytest.mark.parametrize("value", [20.5, -81.25, 0.0])
def test_one_point_is_seen_on_an_axis_that_begins_at_nothing(value: float) -> None:
    (axes,) = curve("", rows_of("episode/return_mean", math.nan, value), []).axes
    (line,) = axes.get_lines()
    assert (line.get_marker(), line.get_xdata(), line.get_ydata()) == ("o", (2000,), (value,))
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert (left, right) == (0, pytest.approx(2100))
    assert low <= 0 <= high
    assert low < value < high
    assert high - low >= abs(value)


def test_a_run_without_an_episode_says_so() -> None:
    (axes,) = curve("", rows_of("episode/return_mean", math.nan), []).axes
    assert axes.get_legend() is None
    assert [text.get_text() for text in axes.texts] == ["no episode has ended yet"]
