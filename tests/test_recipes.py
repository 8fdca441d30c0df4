"""The recipes' own parts: flags, files, the shared trunk; and a short run of each."""

from __future__ import annotations

import csv
import json
import math
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

pytest.importorskip("ale_py")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))

import _support  # noqa: E402  a recipe's neighbour is importable only from its own directory
import a2c_atari  # noqa: E402


@dataclass(frozen=True)
class Flags:
    steps: int = _support.option(3, "how many")
    rate: float = _support.option(0.5, "how fast, in % of the most")
    fast: bool = _support.option(False, "whether")
    goal: float | None = _support.option(None, "how much")


def test_each_field_is_a_flag_of_its_type() -> None:
    assert _support.parse_config(Flags, "", []) == Flags()
    given = ["--steps", "7", "--rate", "2", "--fast", "--goal", "475"]
    assert _support.parse_config(Flags, "", given) == Flags(7, 2.0, True, 475.0)
    assert _support.parse_config(Flags, "", ["--no-fast"]) == Flags()


def test_help_explains_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        _support.parse_config(Flags, "What it is for.", ["--help"])
    shown = capsys.readouterr().out
    for text in ("What it is for.", "--steps", "how many (default: 3)", "in % of the most"):
        assert text in shown


def row(**values: Any) -> _support.Metrics:
    metrics = _support.Metrics(0, 1.0, 100.0, 1, 20.0, 0.25, 0.1, 0.6, 1e-3, math.nan)
    return replace(metrics, **values)


def test_a_run_leaves_its_configuration_metrics_and_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _support.RunLog(tmp_path / "run", Flags(), 200, "A title") as log:
        log.add(row(frames=100))
        log.add(row(frames=200, evaluation_return=30.5))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 3
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(entry["frames"]) for entry in rows] == [100, 200]
    assert float(rows[1]["evaluation_return"]) == 30.5
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "return 20.0" in shown
    assert "100 steps/s" in shown
    assert "learner waited 25%" in shown
    assert "200 steps: evaluation return 30.5" in shown


def test_a_run_that_fails_leaves_what_it_had(tmp_path: Path) -> None:
    def fail() -> None:
        with _support.RunLog(tmp_path, Flags(), 200, "A title") as log:
            log.add(row(frames=100))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 2
    assert (tmp_path / "curve.png").exists()


def frames_batch(num_envs: int, num_steps: int) -> TensorDict:
    """Random frames, with an episode that is cut off and one that ends by itself."""
    shape = (num_envs, num_steps)
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(
        0, 256, (num_envs, num_steps + 1, 4, 84, 84), generator=generator, dtype=torch.uint8
    )
    truncated, terminated = torch.zeros(2, *shape, 1, dtype=torch.bool)
    truncated[0, 1] = terminated[1, 0] = terminated[1, -1] = True
    next_frames = frames[:, 1:].clone()
    ended = (truncated | terminated).squeeze(-1)
    next_frames[ended] = torch.randint(
        0, 256, (int(ended.sum()), 4, 84, 84), generator=generator, dtype=torch.uint8
    )
    return TensorDict(
        {
            "observation": frames[:, :-1].contiguous(),
            "action": torch.randint(0, 6, shape, generator=generator),
            "next": {
                "observation": next_frames,
                "reward": torch.randn(*shape, 1, generator=generator),
                "done": truncated | terminated,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        batch_size=shape,
        names=[None, "time"],
    )


def test_one_pass_of_the_trunk_gives_the_losses_and_gradients_of_four() -> None:
    torch.manual_seed(0)
    trunk = TensorDictModule(a2c_atari.NatureCNN(4), ["observation"], ["hidden"])
    head = TensorDictModule(torch.nn.Linear(512, 6), ["hidden"], ["logits"])
    critic_head = ValueOperator(torch.nn.Linear(512, 1), in_keys=["hidden"])

    def loss_and_gradients(
        actor_net: TensorDictModule, critic: TensorDictModule, encoded: bool
    ) -> tuple[float, list[torch.Tensor]]:
        actor = ProbabilisticActor(
            actor_net, in_keys=["logits"], distribution_class=torch.distributions.Categorical
        )
        batch = frames_batch(3, 4)
        if encoded:
            a2c_atari.encode(trunk, batch)
        GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
        losses = A2CLoss(actor, critic, entropy_coeff=0.01)(batch.reshape(-1))
        loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        loss.backward()
        parameters = [*trunk.parameters(), *head.parameters(), *critic_head.parameters()]
        gradients = [parameter.grad.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return loss.item(), gradients

    once = loss_and_gradients(head, critic_head, encoded=True)
    stock = loss_and_gradients(
        TensorDictSequential(trunk, head), TensorDictSequential(trunk, critic_head), encoded=False
    )
    assert once[0] == pytest.approx(stock[0], rel=1e-5)
    for mine, theirs in zip(once[1], stock[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def run_recipe(name: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *flags])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(RECIPES / name), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def test_ppo_runs_and_reports_a_bar_that_it_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--num-envs", "4", "--sync-interval", "16", "--total-frames", "192"]
    flags += ["--minibatch-size", "32", "--epochs", "1", "--eval-episodes", "2"]
    run_recipe("ppo_cartpole.py", monkeypatch, *flags, "--output-dir", str(tmp_path / "a"))
    with (tmp_path / "a" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(entry["frames"]) for entry in rows] == [64, 128, 192]
    assert float(rows[-1]["evaluation_return"]) > 0.0
    with pytest.raises(SystemExit, match="below the required 501"):
        run_recipe(
            "ppo_cartpole.py",
            monkeypatch,
            *flags,
            "--require-return",
            "501",
            "--output-dir",
            str(tmp_path / "b"),
        )


def test_a2c_runs_on_the_game_and_leaves_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--num-envs", "2", "--total-frames", "40", "--log-interval", "20"]
    run_recipe("a2c_atari.py", monkeypatch, *flags, "--output-dir", str(tmp_path))
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 3
    state = torch.load(tmp_path / "policy.pt")
    assert any(value.shape == (6, 512) for value in state.values())
