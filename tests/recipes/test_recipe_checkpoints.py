"""Checkpoints: whole or not there at all, the newest few of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import script_paths  # noqa: F401  so that the scripts are found
import torch
from full_disks import full_disk
from support.checkpoints import Checkpoints, write_atomically
from support.errors import RecipeError


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (5, 100, 2_000):
        checkpoints.save(step, {"step": step, "values": torch.arange(step)})
    assert [path.name for path in checkpoints.paths()] == [
        "step-000000000100.pt",
        "step-000000002000.pt",
    ]
    state = checkpoints.load()
    assert state["step"] == 2_000
    assert state["values"].equal(torch.arange(2_000))
    assert not list(checkpoints.directory.glob("*.tmp"))


def test_the_one_just_written_stays(tmp_path: Path) -> None:
    """Also beside others of more steps."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (100, 2_000, 2_100):
        checkpoints.save(step, {"step": step})
    path = checkpoints.save(5, {"step": 5, "learners": 1})
    assert checkpoints.load(path)["step"] == 5
    assert path in checkpoints.paths()


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_damaged_checkpoint_is_named_with_what_to_do(tmp_path: Path, size: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"values": torch.arange(10_000)})
    path = checkpoints.save(2, {"values": torch.arange(10_000)})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RecipeError, match=r"step-0*2\.pt is damaged.*move it away to go on from"):
        checkpoints.load()
    path.unlink()
    assert checkpoints.load()["values"].equal(torch.arange(10_000))


def test_one_flipped_bit_is_damage(tmp_path: Path) -> None:
    """Also where it leaves the file readable: torch doesn't look at checksums."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = checkpoints.save(1, {"values": torch.arange(10_000)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RecipeError, match="is damaged"):
        checkpoints.load()


def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.load() is None
    (tmp_path / "step-000000000001.pt").mkdir()
    with pytest.raises(RecipeError, match=r"can't be read \(Is a directory\)"):
        checkpoints.load()
    (tmp_path / "step-000000000001.pt").rmdir()
    torch.save([1], tmp_path / "step-000000000001.pt")
    with pytest.raises(RecipeError, match=r"is damaged.*move it away to begin anew"):
        checkpoints.load()


def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, {"values": torch.arange(10)})
    said = r"can't save.*step-0*2.*File too large.*whole, the newest is step-0*1.pt"
    with pytest.raises(RecipeError, match=said), full_disk(50_000):
        checkpoints.save(2, {"values": torch.arange(50_000)})
    assert checkpoints.load()["values"].equal(torch.arange(10))
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-000000000001.pt"]


def test_a_run_that_is_moved_is_not_begun_again_where_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    checkpoints = Checkpoints(run / "checkpoints", keep=3)
    checkpoints.save(1, {})
    run.rename(tmp_path / "moved")
    for save in (checkpoints.save, lambda step, state: checkpoints.save_part(step, 1, 2, state)):
        with pytest.raises(
            RecipeError, match=rf"{run}, or .* was moved or removed .*--resume {run}"
        ):
            save(2, {})
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(OSError, match="too large"), full_disk(50_000):
        write_atomically(path, bytes(100_000))
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
