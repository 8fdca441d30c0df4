"""Films an episode: plays its actions again where frames are rendered, into an H.264 mp4 file.

Frames are piped to ffmpeg one by one, so an episode of any length takes the memory of one frame.
Knows nothing of torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

import numpy as np
import numpy.typing as npt

__all__ = [
    "draw_without_a_screen",
    "film",
    "find_ffmpeg",
    "partial_path",
    "video_writer",
    "why_unfilmable",
]

Frame = npt.NDArray[np.uint8]  # [height, width, 3], red, green and blue

_LONGER_SIDE = 480  # pixels: smaller frames are enlarged towards it, by an integer
_DEFAULT_FPS = 30.0
# Any of them says that there is a screen, or what to take in its place.
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")


def find_ffmpeg() -> str:
    """Path of the ffmpeg program that comes with imageio-ffmpeg, or that it finds.

    Raises:
        ModuleNotFoundError: if imageio-ffmpeg is not installed.
        RuntimeError: if it finds no program.
    """
    try:
        import imageio_ffmpeg
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "recording a video needs the package imageio-ffmpeg, which is not installed: "
            "pip install 'torchrl_hts[video]'",
            name=error.name,
        ) from error
    path: str = imageio_ffmpeg.get_ffmpeg_exe()
    return path


def draw_without_a_screen() -> None:
    """Let pygame draw in this process where there is no screen, without looking for one.

    SDL, which it is made on, else writes of a missing XDG_RUNTIME_DIR as if that were an error.
    """
    if sys.platform == "linux" and not any(map(os.environ.get, _SCREENS)):
        os.environ["SDL_VIDEODRIVER"] = "dummy"


class Stage(Protocol):
    """What a film needs of an environment; as gymnasium's have it."""

    @property
    def metadata(self) -> dict[str, Any]: ...

    @property
    def render_mode(self) -> str | None: ...

    def reset(self, *, seed: int | None = None) -> Any: ...

    def step(self, action: Any, /) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]: ...

    def render(self) -> Any: ...


def why_unfilmable(env: Stage, seed: int) -> str:
    """Why the frames of an environment can't be filmed, with what to change; "" if they can.

    Tries one, for which the environment is reset.
    """
    if env.render_mode != "rgb_array":
        return (
            f"the environment to film has render_mode={env.render_mode!r}; make it with "
            "render_mode='rgb_array'"
        )
    env.reset(seed=seed)
    return _why_no_frame(env.render())


def film(
    env: Stage,
    seed: int,
    actions: Sequence[Any],
    rewards: Sequence[float],
    path: Path,
    fps: float | None = None,
) -> None:
    """Play an episode again and write it to an mp4 file, one frame per step and one before.

    Args:
        env: made with ``render_mode="rgb_array"``, otherwise equal to the one that was played.
        seed: that the episode began with.
        actions: of the episode, in the format of the environment.
        rewards: of the episode, which the replay must give again.
        path: of the file, which appears complete, and replaces an older one, or not at all.
        fps: frames per second; by default what the environment's metadata says, or 30.

    Raises:
        RuntimeError: if the replay goes another way than the episode, or ffmpeg fails.
    """
    if fps is None:
        fps = float(env.metadata.get("render_fps") or _DEFAULT_FPS)
    with video_writer(path, fps) as write:
        env.reset(seed=seed)
        write(_frame(env))
        for step, (action, expected) in enumerate(zip(actions, rewards, strict=True), 1):
            _, reward, terminated, truncated, _ = env.step(action)
            found = f"a reward of {float(reward)}" if float(reward) != expected else ""
            if (terminated or truncated) and step < len(actions):
                found = "its end"
            if found:
                raise RuntimeError(
                    f"the episode to film can't be played again: step {step} of {len(actions)} "
                    f"gave {found}, where a reward of {expected} was recorded. The environment "
                    "made for rendering must be the same apart from render_mode, and "
                    "reset(seed=...) must fix all that is random in it"
                )
            write(_frame(env))


@contextmanager
def video_writer(path: Path, fps: float) -> Iterator[Callable[[Frame], None]]:
    """A function that appends a frame; the file is complete when the context ends.

    All frames have the shape of the first. Small ones are enlarged by an integer, and odd sides,
    which the format doesn't have, are made even by repeating the last row or column.

    Raises:
        RuntimeError: if ffmpeg fails; what it says is in the message.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "grey.mp4")
        >>> with video_writer(path, fps=30) as write:
        ...     for brightness in range(100):
        ...         write(np.full((48, 64, 3), brightness, np.uint8))
        >>> path.exists()
        True
    """
    partial = partial_path(path)
    encoder: _Encoder | None = None

    def write(frame: Frame) -> None:
        nonlocal encoder
        frame = _enlarge(frame)
        if encoder is None:
            encoder = _Encoder(partial, frame.shape, fps)
        encoder.write(frame)

    try:
        yield write
        if encoder is not None:
            encoder.finish()
            os.replace(partial, path)
    finally:
        if encoder is not None:
            encoder.close()
        partial.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Where a video lies until it is complete: one name, so that one at most can be left."""
    return path.with_name(f".{path.stem}.partial{path.suffix}")


class _Encoder:
    """An ffmpeg process that encodes the frames written to it."""

    def __init__(self, path: Path, shape: tuple[int, ...], fps: float) -> None:
        self._shape = shape
        source = f"-f rawvideo -pix_fmt rgb24 -s {shape[1]}x{shape[0]} -r {fps} -i -".split()
        target = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-threads", "1"]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - unlike a pipe, never full
        self._process = subprocess.Popen(
            [find_ffmpeg(), "-y", "-loglevel", "error", *source, *target, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    def write(self, frame: Frame) -> None:
        """Encode one more frame."""
        if frame.shape != self._shape:
            raise RuntimeError(
                f"the frames changed their shape from {self._shape} to {frame.shape}; all frames "
                "of a video have one shape"
            )
        try:
            self._process.stdin.write(frame.tobytes())  # type: ignore[union-attr]
        except BrokenPipeError:
            self.finish()

    def finish(self) -> None:
        """Complete the file."""
        self._process.communicate()  # closes its input, which ends it
        if self._process.returncode:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()
            raise RuntimeError(f"ffmpeg ended with exit code {self._process.returncode}: {said}")

    def close(self) -> None:
        """End the process if it runs."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _why_no_frame(rendered: Any) -> str:
    """Why what an environment has rendered is no frame; "" if it is one."""
    if isinstance(rendered, np.ndarray) and rendered.ndim == 3 and rendered.shape[2] == 3:
        return ""
    found = getattr(rendered, "shape", None) or type(rendered).__name__
    return f"env.render() gave {found}; expected an array [height, width, 3]"


def _frame(env: Stage) -> Frame:
    rendered: Any = env.render()
    if why := _why_no_frame(rendered):
        raise ValueError(why)
    frame: Frame = rendered.astype(np.uint8, copy=False)
    return frame


def _enlarge(frame: Frame) -> Frame:
    """The frame with even sides, enlarged by an integer if it is small."""
    factor = max(1, _LONGER_SIDE // max(frame.shape))
    frame = frame.repeat(factor, 0).repeat(factor, 1)
    height, width, _ = frame.shape
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), "edge")
