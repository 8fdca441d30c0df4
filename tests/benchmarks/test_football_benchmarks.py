"""The benchmarks of football run, and say what they have measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from football_installed import ENGINES, need
from scripts import run_script

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

pytestmark = pytest.mark.usefixtures("warm_servers")


def run(script: str, *flags: str) -> str:
    return run_script(script, *flags)[0]


def refused(script: str, *flags: str) -> str:
    """The last line of what is said of flags that don't fit."""
    return run_script(script, *flags, code=2)[1].splitlines()[-1]


def test_step_times(tmp_path: Path) -> None:
    need("envpool")
    flags = "--scenarios academy_empty_goal_close --engine envpool --steps 300 --bootstrap 2"
    printed = run("football_steps.py", *flags.split(), "--output-dir", str(tmp_path))
    assert "| academy_empty_goal_close | " in printed
    report = json.loads((tmp_path / "football_steps.json").read_text())
    result = report["results"]["academy_empty_goal_close"]
    assert result["steps"] == 300
    assert 0 < result["mean_s"] <= result["percentile_99_s"]
    for check in (result["gamma_of_steps"], result["gamma_with_resets"]):
        assert check["sums"] == 3
        assert 0 < check["p_value"] <= 1
    assert sum(result["gamma_of_steps"]["sums_s"]) == pytest.approx(300 * result["mean_s"])
    assert len(result["step_us"]) == len(result["reset_us"]) == 300
    assert np.mean(result["step_us"]) == pytest.approx(1e6 * result["mean_s"], abs=0.5)
    assert "<svg" in (tmp_path / "football_steps.svg").read_text()
    others = [*flags.split(), "--steps", "200", "--output-dir", str(tmp_path)]
    message = refused("football_steps.py", *others)
    assert message.endswith("delete it, or give another --output-dir")
    message = refused("football_steps.py", *flags.split(), "--bootstrap", "3", *others[-2:])
    assert "'bootstrap': 2" in message
    (tmp_path / "football_steps.json").unlink()
    run("football_steps.py", *others)


def write_record(folder: Path) -> Path:
    """Steps of 0.5 ms, one in 40 with a reset of 20 ms."""
    scenario = {
        "step_us": [500] * 400,
        "reset_us": [20_000 if i % 40 == 7 else 0 for i in range(400)],
    }
    record = folder / "football_steps.json"
    record.write_text(
        json.dumps({"settings": {}, "machine": {"time": "now"}, "results": {"made up": scenario}})
    )
    return record


def test_theory_of_recorded_times(tmp_path: Path) -> None:
    record = write_record(tmp_path)
    flags = "--num-envs 2 --alpha 20 --lag 1 --slower 2 --seconds 0.001 --rounds 4 --output-dir"
    run("theory_check.py", "--record", str(record), *flags.split(), str(tmp_path / "theory"))
    report = json.loads((tmp_path / "theory" / "theory.json").read_text())
    assert report["env_id"] == "made up, 2 times as long"
    (point,) = report["points"]
    assert point["mean_step_s"] > 2e-3, "1 ms, and the resets; more on a busy machine"
    assert point["step_cv"] > 1, "sleeps of one length would have next to none"
    assert 0 < point["measured"] <= point["recorded"] * 1.001
    message = refused("theory_check.py", "--output-dir", str(tmp_path / "theory"))
    assert message.endswith("choose another --output-dir"), "that of another environment"


def test_theory_of_a_scenario_that_was_not_recorded(tmp_path: Path) -> None:
    flags = ["--record", str(write_record(tmp_path)), "--output-dir", str(tmp_path)]
    message = refused("theory_check.py", "--scenario", "another", *flags)
    assert "--scenario another" in message
    assert "made up" in message


def test_theory_does_not_choose_among_scenarios(tmp_path: Path) -> None:
    record = write_record(tmp_path)
    content = json.loads(record.read_text())
    content["results"]["another"] = content["results"]["made up"]
    record.write_text(json.dumps(content))
    message = refused("theory_check.py", "--record", str(record), "--output-dir", str(tmp_path))
    assert message.endswith(f"--scenario is missing: {record} is of made up, another")


def test_what_giving_up_the_barrier_is_worth(tmp_path: Path) -> None:
    """Some steps have a long reset: with a barrier at each step, all wait for each of them."""
    record = write_record(tmp_path)
    flags = "--num-envs 4 --rounds 4 --repetitions 1 --slower 1"
    printed = run("football_barrier.py", str(record), *flags.split())
    assert "| made up | " in printed
    found = json.loads((tmp_path / "football_barrier.json").read_text())["results"]["made up"]
    # 39 steps of 0.5 ms, and one of 20.5 with its reset.
    assert found["mean_s"] == pytest.approx(0.001)
    predicted = found["predicted_steps_per_second"]
    assert predicted["hts"] <= found["ideal_steps_per_second"] == pytest.approx(4000)
    assert predicted["loop-gymnasium"] < predicted["hts"]
    assert found["measured_gains"][0] > 0
    assert "<svg" in (tmp_path / "football_barrier.svg").read_text()
    message = refused("football_barrier.py", str(record), "--num-envs", "1")
    assert message.endswith("delete it, or move it away"), "what is there is of other settings"


def test_one_pool_or_many() -> None:
    need("envpool")
    flags = "--scenario academy_empty_goal --num-envs 2 --seconds 0.001 --repetitions 1"
    printed = run("football_pool.py", *flags.split(), "--trainings", "collect")
    training, games, *figures = printed.splitlines()[-1].strip("| ").split(" | ")
    assert (training, int(games)) == ("collect", 2)
    assert all(float(figure) > 0 for figure in figures[:3])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["missing.json"], "can't be read"),
        (["football_steps.json"], "lacks the times of single steps"),
        (["football_steps.json", "--num-envs", "0"], "whole number of at least 1, got '0'"),
        (["football_steps.json", "--slower", "0"], "expected a number above 0, got '0'"),
    ],
)
def test_what_the_barrier_can_not_be_told_from(flags: list[str], said: str, tmp_path: Path) -> None:
    record = {"settings": {}, "machine": {"time": "now"}, "results": {"older": {"mean_s": 1.0}}}
    (tmp_path / "football_steps.json").write_text(json.dumps(record))
    file, *others = flags
    assert said in refused("football_barrier.py", str(tmp_path / file), *others)


def test_engines_side_by_side() -> None:
    need(*ENGINES)
    printed = run("football_engines.py", "--scenarios", "academy_empty_goal", "--steps", "60")
    name, differ, *_ = printed.splitlines()[-1].strip("| ").split(" | ")
    assert (name, differ) == ("academy_empty_goal", "0")
