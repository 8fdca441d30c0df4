"""Checkpoints on disk: whole or not there at all, the newest few of them."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from support.errors import RecipeError, quoted

__all__ = ["Checkpoints", "save_atomically", "write_atomically"]


class Checkpoints:
    """The checkpoints ``step-*.pt`` of a run.

    Args:
        directory: where they lie; made if missing.
        keep: how many of the newest are kept, at least 1.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def paths(self) -> list[Path]:
        """All there are, the newest last."""
        return sorted(self.directory.glob("step-*.pt"))

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove those that are too old.

        Raises:
            RecipeError: if it can't be written; the ones before are as they were.
        """
        path = self.directory / f"step-{step:012d}.pt"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            save_atomically(path, state)
        except OSError as error:
            others = self.paths()
            newest = f"the newest is {others[-1].name}" if others else "there is none yet"
            raise RecipeError(
                f"can't save the checkpoint {path}: {error.strerror}. Earlier checkpoints are "
                f"whole, {newest}. Make room, then go on with "
                f"--resume {quoted(self.directory.parent)}"
            ) from error
        for old in (*self.paths()[: -self.keep], *self.directory.glob("*.tmp")):
            old.unlink()
        return path

    def load(self) -> dict[str, Any] | None:
        """The newest checkpoint; None if there is none.

        Raises:
            RecipeError: if it can't be read, is damaged, or would do more than hold data.
        """
        paths = self.paths()
        if not paths:
            return None
        path = paths[-1]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RecipeError(f"the checkpoint {path} can't be read: {error.strerror}") from error
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                if (damaged := archive.testzip()) is not None:  # torch doesn't look at checksums
                    raise ValueError(f"the checksum of {damaged} is wrong")
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            if not isinstance(state, dict):
                raise TypeError(f"it holds a {type(state).__name__}")
        except MemoryError:
            raise
        except Exception as error:  # torch raises whatever it stumbles over
            before = f"go on from {paths[-2].name}" if len(paths) > 1 else "begin anew"
            raise RecipeError(
                f"the checkpoint {path} is damaged, cut off, of another version of torch, or not "
                f"only data: move it away to {before}"
            ) from error
        return state


def save_atomically(path: Path, state: Any) -> None:
    """What ``torch.save`` does, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getbuffer())


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that there is, at every moment, the old one or the new one as a whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
