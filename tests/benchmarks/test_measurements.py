"""What benchmarks have measured is kept, and isn't mixed with what was measured otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import script_paths  # noqa: F401  so that the scripts are found
from _machine import essentials, machine
from _measurements import Measurements, check_settings, differing, write_json

CONDITIONS = {"commit": "abc", "seconds": 1.0, "threads": (1, 2)}


def test_what_failed_is_measured_again(tmp_path: Path) -> None:
    file, key = tmp_path / "all.json", {"contender": "hts", "repetition": 0}
    found = Measurements(file, CONDITIONS)
    found.add(key, {"error": "killed"})
    assert not found.has(key)
    found.add(key, {"steps_per_second": 1.0})
    again = Measurements(file, CONDITIONS)
    assert again.has(key)
    assert again.records == [{**key, "steps_per_second": 1.0}]


@pytest.mark.parametrize("other", [{"commit": "def"}, {"commit": None}, {"device": "cuda"}])
def test_what_was_measured_otherwise_is_refused(other: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    Measurements(file, CONDITIONS).add({}, {})
    ((name, value),) = other.items()
    told = f"with {name} {CONDITIONS.get(name)}, and this would be with {name} {value}: give it"
    with pytest.raises(SystemExit, match=told):
        Measurements(file, {**CONDITIONS, **other})


def test_several_at_the_same_time_have_failed_when_one_has(tmp_path: Path) -> None:
    """The others had the cores to themselves."""
    found = Measurements(tmp_path / "all.json", CONDITIONS)
    found.add({"contender": "parts"}, {"runs": [{"emulator_s": 1.0}, {"error": "killed"}]})
    assert not found.has({"contender": "parts"})


def test_a_file_without_conditions_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    write_json(file, {"machine": {}, "records": []})
    with pytest.raises(SystemExit, match="with commit None, seconds None"):
        Measurements(file, CONDITIONS)


@pytest.mark.parametrize("content", ["", '{"machine": {}, "rec', "[1]", "{}"])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    file.write_text(content)
    with pytest.raises(SystemExit, match=f"error: {file} is damaged"):
        Measurements(file, CONDITIONS)
    with pytest.raises(SystemExit, match=f"error: {file} is damaged"):
        check_settings(file, CONDITIONS)


def test_who_is_killed_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "all.json"
    write_json(file, [1])

    def cut(self: Path, text: str) -> None:
        with self.open("w") as stream:
            stream.write(text[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        write_json(file, [2])
    assert json.loads(file.read_text()) == [1]


def test_figures_side_by_side_are_of_one_machine_and_commit() -> None:
    found = essentials()
    assert {"cpu", "torch_kernels", "numpy_blas_kernels", "cores", "torch", "commit"} <= {*found}
    assert differing(found, machine())[0].count(",") == 3, "memory, load, system and time"
