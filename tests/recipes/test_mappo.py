"""recipes/mappo.py: agents of VMAS, in batches of environments; where vmas is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import probe
import pytest
import torch
from recipe_runs import rows, run
from replaying import replay
from support.errors import RecipeError
from support.options import parse_options
from support.start import check_task_or_exit

from torchrl_hts._learner.learner import environment_seed

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

FLAGS = "mappo.py --num-envs 8 --num-batches 4 --num-agents 2 --max-steps 6 --sync-interval 10"
FLAGS += " --minibatch-size 40 --epochs 2 --total-frames 320 --log-interval 80 --shards 2"
FLAGS += " --hidden-units 16 --checkpoint-interval 160 --eval-interval 160 --eval-episodes 3"
NEEDS_VMAS = "vmas is not installed: pip install 'torchrl_hts[vmas]'"


@pytest.mark.timeout(600)  # processes import vmas, on a machine that may be busy
def test_what_a_run_measures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Beside what test_every_recipe.py looks at, resumption and several learners among it."""
    pytest.importorskip("vmas", reason=NEEDS_VMAS)
    whole = tmp_path / "whole"
    run(FLAGS, "--output-dir", str(whole))
    assert "Warning" not in capfd.readouterr().err, "of workers"
    metrics = rows(whole / "metrics.csv")
    assert [row["step"] for row in metrics] == ["80", "160", "240", "320"]
    assert [row["episode/count"] for row in metrics] == ["8", "24", "40", "48"]
    assert {row["episode/length_max"] for row in metrics} == {"6"}
    assert {"loss/critic", "policy/kl", "optim/gradient_norm"} <= metrics[0].keys()
    evaluations = rows(whole / "evaluations.csv")
    assert [row["step"] for row in evaluations] == ["160", "320"]
    assert {row["evaluation/length_mean"] for row in evaluations} == {"6.0"}
    assert (whole / "best.pt").exists()


SMALL = "mappo.py --num-envs 6 --num-batches 2 --num-agents 2 --max-steps 6 --sync-interval 10"
SMALL += " --minibatch-size 60 --epochs 1 --hidden-units 16 --eval-interval 0 --log-interval 60"


@pytest.mark.timeout(600)
def test_an_episode_is_played_once_more_with_its_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vmas", reason=NEEDS_VMAS)
    directory, film = tmp_path / "run", tmp_path / "film.gif"
    flags = f"{SMALL} --total-frames 300 --checkpoint-interval 60 --keep-checkpoints 9"
    run(flags, "--output-dir", str(directory))
    output = replay(directory, "--round", 4, "--env", 4)
    assert "mappo on navigation, from step-000000000180.pt" in output
    assert "environment 4, round 4: an episode of" in output
    assert "seen from the checkpoint on" in output
    assert "--resume" not in output, "a replay's own directory is nobody's business"
    assert "the same as in the run, bit for bit: rows of metrics.csv (" in output
    monkeypatch.setitem(sys.modules, "pyglet", None)
    output = replay(directory, "--round", 1, "--video", film, code=1)
    assert "error: rendering this environment needs what is not installed" in output
    assert not film.exists()


class Falls:
    """Makes batches of which the one with the fourth environment falls in its 25th step."""

    def __init__(self, make_batch: Callable[..., Any]) -> None:
        self.make_batch = make_batch

    def __call__(self, **settings: Any) -> Any:
        batch = self.make_batch(**settings)
        behind = probe.wrapped(batch)
        step, seed = behind.step, behind.seed
        left = [0]

        def seeded(number: int) -> Any:
            left[0] = 25 if number == environment_seed(0, 3, 0) else 0
            return seed(number)

        def stepped(actions: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise ValueError("a drone fell")
            return step(actions)

        behind.step, behind.seed = stepped, seeded
        return batch


@pytest.mark.timeout(600)
def test_a_batch_that_has_failed_fails_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vmas", reason=NEEDS_VMAS)
    module = importlib.import_module("mappo")
    made = module.batches_of
    monkeypatch.setattr(module, "batches_of", lambda options: Falls(made(options)))
    monkeypatch.chdir(tmp_path)
    said = run(f"{SMALL} --total-frames 600", "--output-dir", "run", code=1)
    assert "a drone fell" in said
    output = replay("run", "--until-error")
    assert "environment 3, round 2, step 4: its state is in run-error.pt" in output
    assert torch.load("run-error.pt", weights_only=True)["environment"].numel() > 1000
    assert "from there it fails here too: ValueError: a drone fell" in output


def test_what_the_recipe_adds_to_a_batch() -> None:
    from tensordict import TensorDict

    reward = torch.tensor([[[[1.0], [3.0]], [[5.0], [9.0]]]])  # one environment, two steps
    flags = torch.tensor([[[False], [True]]])
    agents = TensorDict({"reward": reward}, [1, 2, 2])
    batch = TensorDict({"next": {"agents": agents, "done": flags, "terminated": ~flags}}, [1, 2])
    after = importlib.import_module("mappo").for_each_agent(batch)["next"]
    assert after["reward"].tolist() == [[[2.0], [7.0]]]
    assert after["agents", "done"].tolist() == [[[[False]] * 2, [[True]] * 2]]
    assert after["agents", "terminated"].tolist() == [[[[True]] * 2, [[False]] * 2]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-envs 10", "--num-envs 10 must be a multiple of --num-batches 4"),
        (
            "--shards 8",
            "--num-batches 4 simulations can't be shared out equally among 8 shards: give a multi",
        ),
    ],
)
def test_options_that_make_no_sense(flags: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_options(importlib.import_module("mappo").Options, "", flags.split())


def test_learners_have_whole_batches() -> None:
    options = importlib.import_module("mappo").Options()
    options.check_parts(2)
    message = (
        "--num-batches 4 simulations can't be shared out equally among 8 learners: give a mult"
    )
    with pytest.raises(RecipeError, match=message):
        options.check_parts(8)


def test_scenarios() -> None:
    pytest.importorskip("vmas", reason=NEEDS_VMAS)
    module = importlib.import_module("mappo")
    module.Options(scenario="balance").check_task()
    with pytest.raises(RecipeError, match=r"no scenario chess; it has .*balance.*navigation"):
        module.Options(scenario="chess").check_task()
    said = r"agents that are all alike; observations or actions of adversary_0, agent_0, .* differ"
    with pytest.raises(RecipeError, match=said):
        module.to_play(module.Options(scenario="simple_adversary"))


@pytest.mark.parametrize("scenario", ["drone", "football"])
def test_agents_that_are_alike_have_any_name(scenario: str) -> None:
    pytest.importorskip("vmas", reason=NEEDS_VMAS)
    module = importlib.import_module("mappo")
    make_batch, actor = module.to_play(module.Options(scenario=scenario))
    batch = make_batch(num_envs=1).rollout(2, actor)
    assert batch["next", "agents", "reward"].shape[-2:] == (3, 1)


@pytest.mark.parametrize(
    ("scenario", "num_agents", "message"),
    [
        ("balance", 1, "VMAS can't make balance with --num-agents 1 (AssertionError at 'assert "),
        (
            "passage",
            3,
            "the number of agents in passage is 5, and --num-agents is 3: give --num-agents 5",
        ),
    ],
)
def test_a_number_of_agents_that_the_scenario_refuses_or_ignores(
    scenario: str, num_agents: int, message: str, tmp_path: Path
) -> None:
    pytest.importorskip("vmas", reason=NEEDS_VMAS)
    options = importlib.import_module("mappo").Options(scenario=scenario, num_agents=num_agents)
    with pytest.raises(SystemExit) as end:
        check_task_or_exit(options)
    assert str(end.value).startswith(f"error: {message}")
    check_task_or_exit(replace(options, resume=tmp_path))
    check_task_or_exit(replace(options, num_agents=5))


def test_what_draws_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vmas", reason=NEEDS_VMAS)
    monkeypatch.setitem(sys.modules, "pyglet", None)
    output = run(FLAGS, "--record-video", "--output-dir", str(tmp_path / "run"), code=1)
    assert "error: rendering this environment needs what is not installed" in output
    assert "pip install 'pyglet<2'" in output
    assert "Traceback" not in output


def test_vmas_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"package vmas: pip install 'torchrl_hts\[vmas\]'"):
        importlib.import_module("mappo").Options().check_task()
