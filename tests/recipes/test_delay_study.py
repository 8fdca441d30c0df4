"""The delay study: cells are trained once and reproducibly, and pictures made of what is there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest
import script_paths  # noqa: F401  so that the scripts are found

pytest.importorskip("matplotlib")
import delay_study
from delay_study import Cell
from support.classic import TASKS
from support.errors import RecipeError
from support.minatar_games import MinAtar
from support.study import VARIANTS, curves_of, load, parse, picture

TINY = (
    "--envs cartpole --algorithms ppo --variants lag1-delayed --learning-rates 1 "
    "--total-frames 1500 --seeds"
)


def write_cell(
    directory: Path, cell: Cell, returns: list[float | None], final: float | None
) -> None:
    """A cell's file as the study writes it."""
    directory.mkdir(exist_ok=True)
    curve = {
        "steps": [1000 * (i + 1) for i in range(len(returns))],
        "returns": returns,
        "final_return": final,
        "seconds": 1.0,
    }
    (directory / f"{cell.name}.json").write_text(json.dumps({**cell.description(), **curve}))


def study(arguments: list[str]) -> int:
    """Run the script."""
    return delay_study.main(parse(None, arguments))


def without_time(file: Path) -> dict[str, Any]:
    return {k: v for k, v in json.loads(file.read_text()).items() if k != "seconds"}


@pytest.mark.usefixtures("nothing_left")
def test_a_cell_is_trained_once_and_is_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert study([*TINY.split(), "0", "--output-dir", str(one)]) == 0
    file = one / "cartpole-ppo-lag1-delayed-x1-seed0.json"
    found = json.loads(file.read_text())
    assert found["total_frames"] == 1536  # whole rounds
    assert found["steps"][-1] == 1536
    assert 9 <= found["final_return"] <= 500
    assert "</svg>" in (one / "ppo.svg").read_text()
    assert "1 of 1 cells to run" in capsys.readouterr().out

    before = file.stat()
    assert study([*TINY.split(), "0", "1", "--output-dir", str(one)]) == 0
    assert "1 of 2 cells to run" in capsys.readouterr().out
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)

    study([*TINY.split(), "0", "--output-dir", str(other)])
    assert without_time(other / file.name) == without_time(file)
    another_seed = without_time(one / "cartpole-ppo-lag1-delayed-x1-seed1.json")
    assert another_seed["returns"] != found["returns"]


@pytest.mark.usefixtures("nothing_left")
def test_the_variants_act_with_other_parameters() -> None:
    cells = [Cell("cartpole", "ppo", name, 2.5, 0, total_frames=3072) for name in VARIANTS]
    episodes = {cell.variant: delay_study.train(cell) for cell in cells}
    first = {name: [e for e in found if e[0] <= 512] for name, found in episodes.items()}
    assert all(found == first["lag0"] for found in first.values())  # the initial parameters act
    kinds = {tuple(found) for found in episodes.values()}
    assert len(kinds) == len(VARIANTS)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("env", "algorithm", "variant"),
    [
        ("breakout", "a2c", "lag2-newest"),
        ("breakout", "ppo", "lag2-newest"),
        ("breakout_shared", "a2c", "lag1-split"),
        ("breakout_shared", "ppo", "lag1-delayed"),
    ],
)
def test_minatar_is_trained(env: str, algorithm: str, variant: str) -> None:
    pytest.importorskip("minatar")
    episodes = delay_study.train(Cell(env, algorithm, variant, 1.0, 0, 1500))
    assert len(episodes) > 20
    assert all(value >= 0 for _, value in episodes)


def test_jobs_share_the_cells(tmp_path: Path) -> None:
    study([*TINY.split(), "0", "1", "--jobs", "2", "--output-dir", str(tmp_path)])
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_a_curve_is_the_mean_of_the_episodes_that_ended_in_each_part() -> None:
    cell = Cell("cartpole", "ppo", "lag0", 1.0, 0, total_frames=51_200)  # parts of 1024 steps
    curve = delay_study.learning_curve(
        cell, [(512, 10.0), (1024, 20.0), (1536, 40.0), (46_080, 1.0), (46_592, 2.0), (51_200, 6.0)]
    )
    assert curve["steps"][:2] == [1024, 2048]
    assert curve["steps"][-1] == 51_200
    assert curve["returns"][:3] == [15.0, 40.0, None]
    assert curve["returns"][-1] == 6.0
    assert curve["final_return"] == 4.0  # of steps after 46,080
    assert delay_study.learning_curve(cell, [])["final_return"] is None


def test_cells_of_other_settings_are_not_taken_for_these(tmp_path: Path) -> None:
    write_cell(tmp_path, Cell("cartpole", "ppo", "lag1-delayed", 1.0, 0, 9999), [1.0], 1.0)
    with pytest.raises(RecipeError, match="total_frames was 10240 and is 1536; delete it"):
        study([*TINY.split(), "0", "--output-dir", str(tmp_path)])
    cell = Cell("cartpole", "ppo", "lag1-delayed", 1.0, 0, 1500)
    assert not delay_study.is_done(cell, tmp_path / "another")
    (tmp_path / f"{cell.name}.json").unlink()
    assert not delay_study.is_done(cell, tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_cell_that_is_damaged_is_named(tmp_path: Path, content: str) -> None:
    cell = Cell("cartpole", "ppo", "lag0", 1.0, 0)
    (tmp_path / f"{cell.name}.json").write_text(content)
    said = r"seed0\.json is damaged .*: delete it to run the cell"
    with pytest.raises(RecipeError, match=said):
        load(tmp_path)
    with pytest.raises(RecipeError, match=said):
        delay_study.is_done(cell, tmp_path)


@pytest.mark.parametrize("flag", ["--envs", "--algorithms", "--variants"])
def test_an_unknown_name_is_refused_with_the_known_ones(flag: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"{flag}: nonsense is unknown; known are \w"):
        study([flag, "nonsense", "--output-dir", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


def test_without_cells_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no cells"):
        study(["--plot", "--output-dir", str(tmp_path)])


def test_pictures_and_table_are_made_of_the_cells_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = {0: 480.0, 1: 500.0, 2: 430.0}
    for seed, value in final.items():
        cell = Cell("cartpole", "ppo", "lag1-newest", 2.5, seed)
        write_cell(tmp_path, cell, [None, 100.0, None, 300.0], value)
    write_cell(tmp_path, Cell("acrobot", "a2c", "lag0", 1.0, 0), [-500.0, -80.0], -81.25)
    write_cell(tmp_path, Cell("acrobot", "a2c", "lag1-newest", 1.0, 0), [None, None], None)
    assert study(["--plot", "--output-dir", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.glob("*.svg")} == {"a2c.svg", "ppo.svg"}
    rows = [
        [entry.strip() for entry in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert rows[0] == [
        "environment",
        "algorithm",
        *(variant.label for variant in VARIANTS.values()),
    ]
    error = stdev(final.values()) / math.sqrt(3)
    assert rows[2:] == [
        ["Acrobot-v1", "A2C", "-81.2 (1)", *[""] * 6],
        ["CartPole-v1, learning rate × 2.5", "PPO", "", "", f"470.0 ± {error:.1f} (3)", *[""] * 4],
    ]
    cells = load(tmp_path)["ppo"]["cartpole", 2.5]["lag1-newest"]
    np.testing.assert_array_equal(curves_of(cells), [[np.nan, 100, 200, 300]] * 3)


def test_a_picture_shows_three_lines_at_most_in_each_panel(tmp_path: Path) -> None:
    for multiplier in (1.0, 2.5):
        for name in VARIANTS:
            for seed in (0, 1):
                cell = Cell("cartpole", "ppo", name, multiplier, seed)
                write_cell(tmp_path, cell, [100.0 + seed, 200.0], 200.0)
    figure = picture("ppo", load(tmp_path)["ppo"])
    rules = ["all delayed", "newest", "policy delayed"]
    assert [axes.get_title() for axes in figure.axes] == rules * 2
    assert [axes.get_ylabel() for axes in figure.axes[::3]] == [
        "CartPole-v1",
        "CartPole-v1,\nlearning rate\u00a0×\u00a02.5",
    ]
    assert [len(axes.get_lines()) for axes in figure.axes] == [3] * 6
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["lag 0", "lag 1", "lag 2"]


def test_a_picture_has_no_column_of_a_rule_that_was_not_run(tmp_path: Path) -> None:
    write_cell(tmp_path, Cell("acrobot", "a2c", "lag0", 1.0, 0), [-500.0, -80.0], -80.0)
    (alone,) = picture("a2c", load(tmp_path)["a2c"]).axes
    assert len(alone.get_lines()) == 1
    write_cell(tmp_path, Cell("acrobot", "a2c", "lag2-split", 1.0, 0), [-500.0, -80.0], -80.0)
    (axes,) = picture("a2c", load(tmp_path)["a2c"]).axes
    assert (axes.get_title(), axes.get_ylabel()) == ("policy delayed", "Acrobot-v1")
    assert len(axes.get_lines()) == 2


def test_cells_of_different_lengths_make_no_mean(tmp_path: Path) -> None:
    write_cell(tmp_path, Cell("cartpole", "ppo", "lag0", 1.0, 0, 10_000), [1.0], 1.0)
    write_cell(tmp_path, Cell("cartpole", "ppo", "lag0", 1.0, 1, 20_000), [1.0], 1.0)
    with pytest.raises(RecipeError, match=r"seed1\.json has 20480 steps, others like it 10240"):
        study(["--plot", "--output-dir", str(tmp_path)])
    own = tmp_path / "own"
    own.mkdir()
    (file,) = tmp_path.glob("*seed1.json")
    file.rename(own / file.name)
    assert all(load(folder)["ppo"] for folder in (tmp_path, own))


@pytest.mark.parametrize("env", ["breakout", "space_invaders"])
def test_minatar_depends_on_its_seed_alone(env: str) -> None:
    pytest.importorskip("minatar")
    game = TASKS[env].make_env()
    assert isinstance(game, MinAtar)

    def episode(seed: int, action_before: int) -> list[np.ndarray]:
        game.reset()
        game.step(np.int64(action_before))  # what a sticky first step would repeat
        frames = [game.reset(seed=seed)[0]]
        actions = np.random.default_rng(0)
        for _ in range(5):
            frames.append(game.step(actions.integers(game.action_space.n))[0])
        assert all(game.observation_space.contains(frame) for frame in frames)
        return frames

    assert game.action_space.n > 2
    for seed in range(50):  # of which some begin with a sticky step
        np.testing.assert_array_equal(episode(seed, 1), episode(seed, 2))
    first = episode(0, 1)
    assert not all(np.array_equal(first, episode(seed, 1)) for seed in range(1, 10))
