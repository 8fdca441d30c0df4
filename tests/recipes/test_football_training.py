"""Football in the collector and in its recipe: the same bits for any workers, and what is left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from football_installed import ENGINES, need
from recipe_runs import rows, run

from torchrl_hts.testing import TASKS, train

pytestmark = pytest.mark.usefixtures("nothing_left")

SMALL = "ppo_football.py --num-envs 2 --sync-interval 16 --minibatch-size 16 --log-interval 32"


@pytest.mark.timeout(900)  # three trainings, each with engines of its own
@pytest.mark.parametrize("engine", ENGINES)
def test_i7_batches_and_parameters_are_equal_bit_for_bit(engine: str) -> None:
    """Corners of the grid that ``python -m torchrl_hts.testing determinism`` goes through."""
    need(engine)
    task = TASKS[engine]
    runs = [
        train(task, num_actors=a, num_executors=e, delays=d, rounds=2, num_envs=4)
        for a, e, d in ((1, 1, False), (2, 4, True))
    ]
    assert runs[0] == runs[1]
    other = train(task, num_actors=1, num_executors=2, delays=False, rounds=1, num_envs=4, seed=1)
    assert not set(other) & set(runs[0]), "another seed must differ in everything"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_recipe_trains_and_evaluates(engine: str, tmp_path: Path) -> None:
    need(engine)
    flags = f"{SMALL} --engine {engine} --total-frames 64 --eval-interval 64 --eval-episodes 1"
    output = run(f"{flags} --record-video", "--output-dir", str(tmp_path))
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["32", "64"]
    (evaluation,) = rows(tmp_path / "evaluations.csv")
    assert float(evaluation["evaluation/return_mean"]) in (-1, 0, 1)  # the score
    assert (tmp_path / "best.mp4").exists()
    assert ("begins new episodes" in output) == (engine == "envpool")
    policy = torch.load(tmp_path / "policy.pt")
    assert any(value.shape == (19, 512) for value in policy.values())


def test_an_unknown_scenario_is_one_clear_message(tmp_path: Path) -> None:
    output = run(
        "ppo_football.py --scenario academy_goal", "--output-dir", str(tmp_path / "run"), code=1
    )
    assert output.startswith("error: scenario is 'academy_goal'; expected one of")


def test_what_the_build_lacks_is_named(tmp_path: Path) -> None:
    """In one message, as the line that installs it."""
    for tool in ("bash", "sed", "find", "head", "tr", "dirname"):
        target = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout
        (tmp_path / tool).symlink_to(target.strip())
    python = tmp_path / "python"  # of an environment without gfootball
    python.write_text(
        "#!/bin/bash\n[[ $2 == *gfootball* ]] && exit 1\n[[ $2 == *cp* ]] && echo cp311\nexit 0\n"
    )
    python.chmod(0o755)
    script = Path(__file__).parents[2] / "requirements" / "football.sh"
    done = subprocess.run(
        [str(script), str(python)],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "apt-get install --no-install-recommends cmake build-essential\n" in done.stderr
