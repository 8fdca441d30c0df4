"""Films of an environment with what its policy chose from beside each frame."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from support.films import ffmpeg, to_gif
from support.stages import Stage

__all__ = ["Film"]

_PANEL = 320  # pixels across, right of each frame
_LINE = 20  # pixels from line to line
_MOST_ACTIONS = 18  # that a panel has lines for


class Film:
    """A film of an environment, with what the policy chose from beside each frame.

    Args:
        file: in .mp4 or .gif, there when the context has ended without an error.
        fps: frames per second; None for what the environment says.

    Raises:
        ModuleNotFoundError: if imageio-ffmpeg is not installed.
    """

    def __init__(self, file: Path, fps: float | None) -> None:
        self._ffmpeg = ffmpeg()
        self._file, self._fps = file, fps
        self._folder = tempfile.TemporaryDirectory()
        self._film = Path(self._folder.name, "film.mp4")
        self._writer: Any = None

    def add(
        self,
        stage: Stage,
        env: int,
        lines: list[str],
        chosen_from: dict[str, Tensor],
        action: Tensor | None,
    ) -> None:
        """Add a frame.

        Args:
            stage: that renders it.
            env: number of the environment.
            lines: of text beside it.
            chosen_from: `support.choices.Choices` of this step ``[A]``; empty for none.
            action: that was chosen; None for none.
        """
        bars = _bars(chosen_from, action, stage.meanings)
        picture = _with_panel(stage.frame(env), lines, bars)
        if self._writer is None:
            fps = self._fps or float(stage.fps or 30)
            self._writer = self._ffmpeg.write_frames(
                str(self._film), picture.size, fps=fps, macro_block_size=2
            )
            self._writer.send(None)
            self._size = picture.size
        self._writer.send(_of_size(picture, self._size).tobytes())

    def __enter__(self) -> Film:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._folder:
            if self._writer is not None:
                self._writer.close()
                if kind is None:
                    self._file.parent.mkdir(parents=True, exist_ok=True)
                    if self._file.suffix == ".gif":
                        to_gif(self._film, self._file)
                    else:
                        shutil.move(self._film, self._file)


def _of_size(picture: Any, size: tuple[int, int]) -> Any:
    """A picture on white, cut off where it is larger: all frames of a film have one size."""
    from PIL import Image

    canvas = Image.new("RGB", size, "white")
    canvas.paste(picture, (0, 0))
    return canvas


def _bars(
    chosen_from: dict[str, Tensor], action: Tensor | None, meanings: list[str] | None
) -> list[tuple[str, float, bool]]:
    """A line of text for each action, the length of its bar from 0 to 1, and if it was chosen."""
    if "probability" in chosen_from:
        probabilities = chosen_from["probability"].tolist()
        chosen = -1
        if action is not None:
            chosen = int(action) if action.numel() == 1 else int(action.argmax())
        return [
            (f"{p:4.0%} {meanings[at] if meanings else f'action {at}'}", p, at == chosen)
            for at, p in enumerate(probabilities)
        ]
    if "middle" in chosen_from and action is not None:
        parts = zip(action.reshape(-1).tolist(), chosen_from["middle"].tolist(), strict=True)
        return [(f"{value:+.2f}, drawn around {middle:+.2f}", 0.0, True) for value, middle in parts]
    if "mean" in chosen_from and action is not None:
        means = chosen_from["mean"].tolist()
        deviations = chosen_from.get("deviation", chosen_from["mean"] * 0).tolist()
        parts = zip(action.reshape(-1).tolist(), means, deviations, strict=True)
        return [
            (f"{value:+.2f}, of {mean:+.2f} ± {deviation:.2f}", 0.0, True)
            for value, mean, deviation in parts
        ]
    return []


def _with_panel(frame: Any, lines: list[str], bars: list[tuple[str, float, bool]]) -> Any:
    """A picture with even sides: the frame, enlarged by an integer if it is small, and the text."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont  # which matplotlib needs too

    factor = max(1, round(400 / frame.shape[0]))
    left = Image.fromarray(np.ascontiguousarray(frame, np.uint8)).resize(
        (frame.shape[1] * factor, frame.shape[0] * factor), Image.Resampling.NEAREST
    )
    height = max(left.height, _LINE * (len(lines) + min(len(bars), _MOST_ACTIONS) + 2))
    width = left.width + _PANEL
    picture = Image.new("RGB", (width + width % 2, height + height % 2), "white")
    picture.paste(left, (0, 0))
    draw = ImageDraw.Draw(picture)
    font = ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), 13)
    x, y = left.width + 12, 12
    for line in lines:
        draw.text((x, y), line, "black", font)
        y += _LINE
    y += _LINE // 2
    for text, share, chosen in bars[:_MOST_ACTIONS]:
        length = round(share * (_PANEL - 24))
        if length:
            draw.rectangle((x, y, x + length, y + _LINE - 4), "#f2b56b" if chosen else "#c9d8ea")
        draw.text((x + 4, y), text, "black" if chosen else "#444444", font)
        y += _LINE
    return picture
