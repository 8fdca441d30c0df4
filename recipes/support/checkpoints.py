"""Checkpoints on disk: whole or not there at all, the newest few of them."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from support.errors import RecipeError, quoted
from support.old_runs import checkpoints_in, moved
from torchrl_hts import Failure, WorkerError

__all__ = ["Checkpoints", "of_another_version", "read_saved", "save_atomically", "write_atomically"]


class Checkpoints:
    """The checkpoints ``step-*.pt`` of a run.

    Beside that of one of several learners lie the parts ``step-*.part-1-of-4`` of the others, which
    are written before it.

    Args:
        directory: where they lie; made if missing, but not what it lies in.
        keep: how many of the newest are kept, at least 1.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def paths(self) -> list[Path]:
        """All there are, the newest last."""
        return checkpoints_in(self.directory)

    def newest(self) -> Path | None:
        """The newest there is."""
        return max(self.paths(), default=None)

    def how_to_go_on(self, error: BaseException | None = None) -> str:
        """What to do after a failure.

        Args:
            error: that a run can be had again for; of an environment's it is said how.
        """
        newest, directory = self.newest(), quoted(self.directory.parent)
        if newest is None:
            text = f"this run has no checkpoint yet: --resume {directory} begins it anew"
        else:
            text = f"--resume {directory} goes on from this run's newest checkpoint, {newest.name}"
        if _is_of_an_environment(error):
            text += f"; recipes/replay.py {directory} --until-error goes into the failure again"
        return text

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove those that are too old.

        Args:
            step: of the run.
            state: with the number of ``"learners"``, if there are several.

        Raises:
            RecipeError: if it can't be written, or a part of another learner is not there; the ones
                before are as they were.
        """
        path = self.directory / f"step-{step:012d}.pt"
        learners = state.get("learners", 1)
        for rank in range(1, learners):
            if not _part(path, rank, learners).exists():
                raise RecipeError(
                    f"learner {rank} has written its part of {path} elsewhere: all machines need "
                    "to share the --output-dir"
                )
        self._write(path, state)
        kept = {path, *self.paths()[-self.keep :]}  # this one, also if it is of fewer steps
        for old in {*self.paths(), *self.directory.glob("*.tmp")} - kept:
            old.unlink()
        stems = {each.stem for each in kept}
        for part in self.directory.glob("step-*.part-*-of-*"):
            of_others = part.stem == path.stem and not part.name.endswith(f"-of-{learners}")
            if part.stem not in stems or of_others:
                part.unlink()
        return path

    def save_part(self, step: int, rank: int, learners: int, state: dict[str, Any]) -> Path:
        """Write the part of a learner that is not the first.

        Raises:
            RecipeError: if it can't be written.
        """
        path = _part(self.directory / f"step-{step:012d}.pt", rank, learners)
        self._write(path, state)
        return path

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        try:
            self.directory.mkdir(exist_ok=True)
            save_atomically(path, state)
        except FileNotFoundError as error:
            raise moved(self.directory.parent) from error
        except OSError as error:
            others = self.paths()
            newest = f"the newest is {others[-1].name}" if others else "there is none yet"
            raise RecipeError(
                f"can't save the checkpoint {path}: {error.strerror}. Earlier checkpoints are "
                f"whole, {newest}. Make room, then go on with "
                f"--resume {quoted(self.directory.parent)}"
            ) from error

    def load(self, path: Path | None = None) -> dict[str, Any] | None:
        """A checkpoint, by default the newest; None if there is none.

        Raises:
            RecipeError: if it can't be read, is damaged, or would do more than hold data.
        """
        path = path or self.newest()
        return None if path is None else self._read(path, path)

    def parts_of_learners(
        self, path: Path, state: Mapping[str, Any], rank: int, size: int
    ) -> list[Mapping[str, Any]]:
        """The parts of those learners that had a learner's environments when they were saved.

        Args:
            path: of the checkpoint.
            state: in it, where the first learner's is.
            rank, size: of the learner, and of how many today.

        Raises:
            RecipeError: if one can't be read, is damaged, or would do more than hold data.
        """
        saved_by = state.get("learners", 1)
        first, end = rank * saved_by // size, -(-(rank + 1) * saved_by // size)
        return [
            state["parts"] if part == 0 else self._read(_part(path, part, saved_by), path)
            for part in range(first, end)
        ]

    def _read(self, path: Path, checkpoint: Path) -> dict[str, Any]:
        try:
            return read_saved(path)
        except MemoryError:
            raise
        except Exception as error:
            earlier = [each for each in self.paths() if each < checkpoint]
            before = f"go on from {earlier[-1].name}" if earlier else "begin anew"
            moved = "it" if path == checkpoint else str(checkpoint)
            fault = "is damaged, cut off, of another version of torch, or not only data:"
            if isinstance(error, OSError):
                mend = "put it back" if isinstance(error, FileNotFoundError) else "let it be read"
                fault = f"can't be read ({error.strerror}): {mend}, or"
            raise RecipeError(
                f"the checkpoint {path} {fault} move {moved} away to {before}"
            ) from error


def _is_of_an_environment(error: BaseException | None) -> bool:
    """Whether an environment failed, by itself, in one of its steps."""
    if not isinstance(error, WorkerError) or error.worker_kind != "executor":
        return False
    return bool(error.stepped) and error.failure is not Failure.KILLED


def _part(checkpoint: Path, rank: int, learners: int) -> Path:
    """Where a learner's part of a checkpoint lies."""
    return checkpoint.with_name(f"{checkpoint.stem}.part-{rank}-of-{learners}")


def of_another_version(path: Path, error: Exception) -> RecipeError:
    """The error of a checkpoint that holds something else than is looked for in it."""
    return RecipeError(
        f"{path} is of another version ({type(error).__name__}: {error}): replay it with the one "
        "that made it"
    )


def read_saved(path: Path) -> dict[str, Any]:
    """What `save_atomically` has written, on the CPU; runs no code that comes with it.

    Raises:
        OSError: if it can't be read.
        Exception: of any kind, if it is damaged, of another version of torch, or not only data.
    """
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if (damaged := archive.testzip()) is not None:  # torch doesn't look at checksums
            raise ValueError(f"the checksum of {damaged} is wrong")
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise TypeError(f"it holds a {type(state).__name__}")
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
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):  # which names the other file, or none
            error.filename, error.filename2 = str(path), None
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
