"""Films: playable files, complete or not there, of just the episode that was played."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from torchrl_hts._evaluation.video import (
    draw_without_a_screen,
    film,
    find_ffmpeg,
    video_writer,
    why_unfilmable,
)

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")

ROOT = Path(__file__).parents[2]


def read(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Metadata and frames ``[time, height, width, 3]`` of a video."""
    frames = imageio_ffmpeg.read_frames(str(path))
    meta = next(frames)
    width, height = meta["size"]
    raw = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in frames]
    return meta, np.stack(raw)


class FlashEnv(gym.Env[Any, Any]):
    """Its whole screen shows the step, brighter by what was done; rewards with the action."""

    def __init__(
        self, shape: tuple[int, int] = (5, 7), render_mode: str | None = "rgb_array", fps: int = 10
    ) -> None:
        self.observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(3)
        self.shape, self.render_mode = shape, render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": fps}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.length = int(self.np_random.integers(3, 6))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.zeros(1, np.float32), float(action), self.t >= self.length, False, {}

    def render(self) -> np.ndarray:
        return np.full((*self.shape, 3), 20 + 40 * self.t, np.uint8)


def episode(env: gym.Env[Any, Any], seed: int) -> tuple[list[Any], list[float]]:
    """Actions and rewards of an episode."""
    env.reset(seed=seed)
    actions, rewards, over = [], [], False
    while not over:
        action = len(actions) % 3
        _, reward, over, _, _ = env.step(action)
        actions.append(action)
        rewards.append(float(reward))
    return actions, rewards


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((210, 160), (320, 420)),  # twice an Atari screen
        ((400, 600), (600, 400)),  # large enough
        ((5, 7), (476, 340)),  # 68 times
        ((481, 303), (304, 482)),  # odd sides are made even
    ],
)
def test_the_film_is_h264_with_even_sides(
    shape: tuple[int, int], size: tuple[int, int], tmp_path: Path
) -> None:
    env = FlashEnv(shape)
    actions, rewards = episode(env, seed=1)
    film(env, 1, actions, rewards, tmp_path / "best.mp4")
    meta, frames = read(tmp_path / "best.mp4")
    assert meta["size"] == size
    assert meta["codec"] == "h264"
    assert meta["pix_fmt"].startswith("yuv420p")
    assert meta["fps"] == 10
    assert len(frames) == len(actions) + 1
    for t, frame in enumerate(frames):
        assert abs(frame.astype(int) - (20 + 40 * t)).max() < 8


def test_the_rate_can_be_given(tmp_path: Path) -> None:
    env = FlashEnv()
    film(env, 1, *episode(env, seed=1), tmp_path / "best.mp4", fps=15)
    assert read(tmp_path / "best.mp4")[0]["fps"] == 15


def test_pixels_are_enlarged_not_blurred(tmp_path: Path) -> None:
    frame = np.zeros((4, 6, 3), np.uint8)
    frame[:, 3:] = 255
    with video_writer(tmp_path / "half.mp4", fps=5) as write:
        write(frame)
    _, frames = read(tmp_path / "half.mp4")
    assert frames.shape == (1, 320, 480, 3)
    assert frames[0, :, :236].max() < 30
    assert frames[0, :, 244:].min() > 225


def test_another_episode_is_an_error_and_leaves_the_old_film(tmp_path: Path) -> None:
    env, path = FlashEnv(), tmp_path / "best.mp4"
    actions, rewards = episode(env, seed=1)
    film(env, 1, actions, rewards, path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match=r"step 2 of \d gave a reward of 1.0, where .* of 1.5"):
        film(env, 1, actions, [rewards[0], 1.5, *rewards[2:]], path)
    with pytest.raises(RuntimeError, match=rf"step {len(actions)} of {len(actions) + 1} gave its"):
        film(env, 1, [*actions, 0], [*rewards, 0.0], path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_ffmpeg_says_is_in_the_error(tmp_path: Path) -> None:
    env = FlashEnv((480, 480))
    with pytest.raises(RuntimeError, match=r"(?s)exit code [1-9]\d*: .*No such file or directory"):
        film(env, 1, *episode(env, seed=1), tmp_path / "nowhere" / "best.mp4")


def test_frames_of_several_shapes_are_an_error(tmp_path: Path) -> None:
    with video_writer(tmp_path / "best.mp4", fps=5) as write:
        write(np.zeros((480, 480, 3), np.uint8))
        with pytest.raises(RuntimeError, match="changed their shape"):
            write(np.zeros((480, 478, 3), np.uint8))


def test_what_does_not_render_is_said_at_once() -> None:
    why = why_unfilmable(FlashEnv(render_mode=None), seed=0)
    assert why.endswith("render_mode=None; make it with render_mode='rgb_array'")
    assert why_unfilmable(FlashEnv(), seed=0) == ""


def test_a_missing_package_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchrl_hts\[video\]'"):
        find_ffmpeg()


SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "XDG_RUNTIME_DIR")


def test_pygame_says_nothing_of_a_screen_that_is_not_there() -> None:
    pytest.importorskip("pygame")
    code = (
        "import gymnasium as gym\n"
        "from torchrl_hts._evaluation.video import draw_without_a_screen\n"
        "draw_without_a_screen()\n"
        "env = gym.make('CartPole-v1', render_mode='rgb_array')\n"
        "env.reset()\n"
        "print(env.render().shape)"
    )
    without = {name: value for name, value in os.environ.items() if name not in SCREENS}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=without)
    assert (done.returncode, done.stderr) == (0, "")
    assert "(400, 600, 3)" in done.stdout


def test_evaluations_are_filmed_without_a_word_of_a_screen(tmp_path: Path) -> None:
    """By a program that knows nothing of it."""
    pytest.importorskip("pygame")
    pytest.importorskip("imageio_ffmpeg")
    script = tmp_path / "films.py"
    script.write_text(
        "import functools, gymnasium as gym\n"
        "from torchrl_hts import Evaluator\n"
        "if __name__ == '__main__':\n"
        "    make = functools.partial(gym.make, 'CartPole-v1')\n"
        "    film = functools.partial(make, render_mode='rgb_array')\n"
        "    options = {'create_render_env_fn': film, 'video_path': 'a.mp4'}\n"
        "    with Evaluator(make, None, num_episodes=1, **options) as evaluator:\n"
        "        evaluator.submit(0)\n"
        "        print(evaluator.wait()[0].video)\n"
    )
    without = {name: value for name, value in os.environ.items() if name not in SCREENS}
    without["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=without)
    assert done.stdout.strip().endswith("a.mp4")
    assert "XDG_RUNTIME_DIR" not in done.stderr


@pytest.mark.parametrize(("name", "value"), [("DISPLAY", ":0"), ("SDL_VIDEODRIVER", "x11")])
def test_a_screen_that_is_there_is_drawn_on(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for each in SCREENS:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    before = dict(os.environ)
    draw_without_a_screen()
    assert dict(os.environ) == before


def test_the_module_loads_neither_torch_nor_imageio() -> None:
    code = (
        "import sys, torchrl_hts._evaluation.video\n"
        "print({'torch', 'imageio_ffmpeg'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"
