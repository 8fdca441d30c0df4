"""Films of episodes, in .mp4 and .gif."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from support.errors import RecipeError

__all__ = ["ffmpeg", "filming", "frame_of", "to_gif", "try_out"]

_NO_WINDOW = "this environment has no window"

# At most 25 frames per second and 480 pixels across, in 256 colours of its own.
_GIF = (
    "fps='min(source_fps,25)',scale='min(480,iw)':-1:flags=lanczos,"
    "split[a][b];[a]palettegen[p];[b][p]paletteuse"
)


@contextlib.contextmanager
def filming(
    file: Path | None, make_env: Callable[..., Any], fps: float | None
) -> Iterator[dict[str, Any]]:
    """Arguments of an `Evaluator` that films its best episode into a file.

    Args:
        file: in .mp4 or .gif, there when the context has ended; None for no film.
        make_env: of the evaluator; called with ``render_mode="rgb_array"`` for what is filmed.
        fps: frames per second; None for what the environment says.
    """
    if file is None:
        yield {}
        return
    ffmpeg()
    try_out(make_env, "rgb_array")
    with tempfile.TemporaryDirectory() as folder:
        film = file if file.suffix == ".mp4" else Path(folder, "film.mp4")
        render_env = partial(make_env, render_mode="rgb_array")
        yield {"video_path": film, "create_render_env_fn": render_env, "fps": fps}
        if film != file:
            to_gif(film, file)


def try_out(make_env: Callable[..., Any], render_mode: str) -> None:
    """Find out whether an environment can be shown, here and not in a process that plays it.

    Raises:
        RecipeError, ValueError, gymnasium.error.Error: if it can't.
    """
    try:
        env = make_env(render_mode=render_mode)
    except TypeError as error:
        raise RecipeError(f"this environment takes no render_mode: {error}") from error
    except ValueError as error:
        if render_mode != "human":
            raise
        raise RecipeError(f"{_NO_WINDOW} ({error}): film an episode with --video FILE") from error
    try:
        if not isinstance(env, gym.Env):
            _try_out_torchrl(env, render_mode)
        elif render_mode == "rgb_array":
            with _drawing():
                env.reset(seed=0)
                frame_of(env)
    finally:
        env.close()


def _try_out_torchrl(env: Any, render_mode: str) -> None:
    """The same of an environment of TorchRL, such as a batch of VMAS's."""
    if render_mode != "rgb_array":
        raise RecipeError(f"{_NO_WINDOW}, being TorchRL's: film an episode with --video FILE")
    env.reset()
    with _drawing():
        env.render(mode=render_mode) if env.batch_size else env.render()


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Say in one sentence what stands between an environment and a picture.

    Raises:
        RecipeError: in the place of any error but gymnasium's.
    """
    try:
        yield
    except (RecipeError, gym.error.Error):
        raise
    except ImportError as error:
        raise RecipeError(
            f"rendering this environment needs what is not installed ({error}); for VMAS it is "
            "pyglet: pip install 'pyglet<2'"
        ) from error
    except Exception as error:  # whatever a driver raises
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise RecipeError(
            f"this environment can't be rendered here: {said[0]}; where there is no screen, "
            "MuJoCo needs MUJOCO_GL=egl, or osmesa"
        ) from error


def frame_of(env: Any) -> Any:
    """What it renders: an array ``[height, width, 3]``.

    Raises:
        RecipeError: if it renders none.
    """
    frame = env.render()
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise RecipeError("the environment renders no frames: it can't be filmed")
    return frame


def ffmpeg() -> Any:
    """The module of imageio-ffmpeg.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    try:
        import imageio_ffmpeg
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a film needs the package imageio-ffmpeg, which is not installed: "
            "pip install 'torchrl_hts[video]'",
            name=error.name,
        ) from error
    return imageio_ffmpeg


def to_gif(film: Path, gif: Path) -> None:
    """Make a GIF of a film.

    Raises:
        RecipeError: if ffmpeg can't.
    """
    gif.parent.mkdir(parents=True, exist_ok=True)
    command = [ffmpeg().get_ffmpeg_exe(), "-y", "-loglevel", "error", "-i", film, "-vf", _GIF, gif]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RecipeError(f"{gif} can't be written: {done.stderr.strip()}")
