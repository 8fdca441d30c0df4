"""Advice about states, evaluations and games, followed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from environments import EchoEnv
from football_installed import need
from gymnasium import wrappers
from policies import marked
from resumption import Plain, check_resumption

from torchrl_hts import Evaluator
from torchrl_hts._reports.picture import draw
from torchrl_hts._reports.timeline import Timeline, check_path
from torchrl_hts.bench.__main__ import main
from torchrl_hts.bench.measuring import default_policy
from torchrl_hts.env_state import CannotSaveError, restore_environment, save_environment
from torchrl_hts.envs import make_atari, make_football
from torchrl_hts.envs.atari import check_atari

ROOT = Path(__file__).parents[2]


def said_by(call: Callable[[], Any]) -> str:
    """The message with which something is refused."""
    with pytest.raises((TypeError, ValueError, RuntimeError, ImportError, CannotSaveError)) as e:
        call()
    return str(e.value)


class Locked(EchoEnv):
    """Holds what can't be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Telling(Locked):
    """Says itself what its state is."""

    def get_state(self) -> Any:
        return self.seed, self.episode, self.t

    def set_state(self, state: Any) -> None:
        self.seed, self.episode, self.t = state


def test_an_environment_that_holds_a_lock() -> None:
    message = said_by(lambda: save_environment(Locked()))
    assert "keep its state in what pickle saves whole, or define get_state() and set_state" in (
        message
    )
    check_resumption(EchoEnv, 20)
    check_resumption(Telling, 20)


@pytest.mark.parametrize("kept", [dict.fromkeys([3, 1, 2]), sorted({3, 1, 2})])
def test_a_set(kept: Any) -> None:
    message = said_by(lambda: save_environment(Plain({3, 1, 2})))
    assert "use a dict with values of None, or a sorted list" in message
    restored = Plain()
    restore_environment(restored, save_environment(Plain(kept)))
    assert list(restored.value) == list(kept)


def test_a_state_of_another_environment() -> None:
    def make() -> Any:
        return wrappers.TimeLimit(Plain([1]), 5)

    state = save_environment(make())
    message = said_by(lambda: restore_environment(Plain(), state))
    assert "Restore it in an environment of the factory that made the saved one" in message
    restored = make()
    restore_environment(restored, state)
    assert restored.unwrapped.value == [1]


class Drawn(EchoEnv):
    """Can be filmed."""

    render_mode = "rgb_array"

    def render(self) -> Any:
        return np.full((16, 16, 3), 40 * self.t, np.uint8)


def test_a_video(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "best.mp4"
    message = said_by(lambda: Evaluator(EchoEnv, marked(), video_path=path))
    assert "a video needs both video_path and create_render_env_fn" in message
    with pytest.raises(TypeError, match="make it with render_mode='rgb_array'"):
        Evaluator(EchoEnv, marked(), video_path=path, create_render_env_fn=EchoEnv)
    options: Any = {"video_path": path, "create_render_env_fn": Drawn, "num_episodes": 1, "fps": 5}
    with Evaluator(EchoEnv, marked(), **options) as evaluator:
        evaluator.submit(0)
        evaluator.wait()
    assert path.stat().st_size


def test_a_timelines_ending(tmp_path: Path) -> None:
    message = said_by(lambda: check_path(tmp_path / "it.txt"))
    for ending in message.split("must end in one of ")[1].split(";")[0].split(", "):
        assert check_path(tmp_path / f"it{ending}")


def test_a_picture_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    nothing = Timeline({}, sync_interval=1, lag=0)
    message = said_by(lambda: draw(nothing, tmp_path / "it.png"))
    assert message.endswith("or write a trace (.json)")
    nothing.write(tmp_path / "it.json")
    assert (tmp_path / "it.json").stat().st_size


def test_a_game_without_its_prefix() -> None:
    pytest.importorskip("ale_py")
    message = said_by(lambda: make_atari("Pong-v5"))
    assert message.endswith("prefix the name of the game with 'ALE/'")
    check_atari("ALE/" + "Pong-v5")


def test_football() -> None:
    """What says how an engine is had is there; a player too many, and another engine."""
    assert "\nfootball:" in (ROOT / "Makefile").read_text()
    assert (ROOT / "docs" / "results" / "football.md").exists()
    options: Any = {"engine": "envpool", "representation": "simple115v2"}
    message = said_by(lambda: make_football("academy_empty_goal", **options))
    assert message.endswith("take engine='gfootball'")
    need("gfootball")
    game = make_football("academy_empty_goal", representation="simple115v2", engine="gfootball")
    for call in (lambda: game.step(0), game.render, lambda: save_environment(game)):
        assert "call reset() before" in said_by(call)
    game.reset(seed=0)
    game.step(0)
    save_environment(game)
    game.close()
    message = said_by(lambda: make_football(number_of_left_players_agent_controls=99))
    assert "give 1 to " in message


def make_policy() -> Any:
    """For `python -m torchrl_hts.bench --policy`."""
    return marked()


def test_what_the_bench_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    settings = "--num-envs 1 --alpha 2 --lag 0 --actors 1 --seconds 0.01 --no-check"
    flags = settings.split()

    def told(*more: str) -> str:
        assert main([*more, *flags]) == 2
        return capsys.readouterr().err

    space = gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (2,), np.float32))
    env = EchoEnv()
    env.observation_space = space
    assert "name one with --policy module:function" in said_by(lambda: default_policy(env))
    assert "expected module:function, such as my_envs:make_env" in told(
        "--env-id", "environments:EchoEnv", "--policy", "make_policy"
    )
    given = ("--env-id", "environments:EchoEnv", "--policy", f"{__name__}:make_policy")
    assert main([*given, *flags]) == 0
    assert "Take 1 environment" in capsys.readouterr().out
