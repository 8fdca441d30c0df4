"""What has been measured, kept in a file that a run which was stopped goes on from."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _machine import machine

__all__ = [
    "Measurements",
    "Record",
    "check_settings",
    "differing",
    "has_failed",
    "keep_others_out",
    "note_settings",
    "write_json",
]

Record = dict[str, Any]  # one measurement: what was measured, and its result or its error


def write_json(file: Path, content: Any) -> None:
    """Writes a file anew; whoever is killed meanwhile leaves the old one whole."""
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    unfinished.replace(file)


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> tuple[str, str]:
    """What differs between two sets of settings, as the one has it and as the other has."""
    names = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]

    def told(values: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {values.get(name)}" for name in names)

    return told(found), told(expected)


def note_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Write down, beside a file that is to come, what it will be of."""
    write_json(file.with_suffix(".json"), {"settings": settings, "machine": machine()})


def check_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Tell of a file that is there and is of other settings; one without a note is taken as it is.

    Raises:
        SystemExit: if they are others, or the note is damaged.
    """
    note = file.with_suffix(".json")
    if not file.exists():
        return
    if not note.exists():
        print(f"{file} is taken as it is: nobody noted its settings", file=sys.stderr)
        return
    noted = _read(note, "settings")["settings"]
    found, expected = differing(noted if isinstance(noted, dict) else {}, settings)
    if found:
        raise SystemExit(
            f"error: {file} is of a run with {found}, and this would be with {expected}: "
            "give another --output-dir"
        )


def has_failed(record: Record) -> bool:
    """Whether it was not measured, or of several processes not in each."""
    return any("error" in run for run in record.get("runs", [record]))


def keep_others_out(directory: Path) -> None:
    """Let no other run write to a directory until this process ends.

    Raises:
        SystemExit: if one does already.
    """
    try:
        fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"error: another run writes to {directory}") from None


def _read(file: Path, *names: str) -> dict[str, Any]:
    """What a file holds, if there is an object of JSON in it with these names."""
    try:
        found = json.loads(file.read_text())
    except ValueError:  # what is no text, too
        found = None
    if not isinstance(found, dict) or not {*names} <= found.keys():
        raise SystemExit(
            f"error: {file} is damaged, or has no {' and '.join(names)}: delete it, or give "
            "another --output-dir"
        )
    return found


class Measurements:
    """All that has been measured, kept in a file.

    Args:
        file: where.
        conditions: under which all of it is measured.

    Raises:
        SystemExit: if that was not so, or the file is damaged.
    """

    def __init__(self, file: Path, conditions: dict[str, Any]) -> None:
        self._file = file
        # As they will be read: JSON has no tuples.
        conditions = json.loads(json.dumps(conditions))
        self._report: dict[str, Any] = (
            _read(file, "machine", "records")
            if file.exists()
            else {"machine": machine(), "conditions": conditions, "records": []}
        )
        found, expected = differing(self._report.get("conditions", {}), conditions)
        if found:
            raise SystemExit(
                f"error: {file} was measured with {found}, and this would be with {expected}: "
                "give it an --output-dir of its own"
            )

    @property
    def records(self) -> list[Record]:
        return self._report["records"]

    def has(self, key: Record) -> bool:
        """Whether a measurement is there already."""
        return any(
            key.items() <= record.items() and not has_failed(record) for record in self.records
        )

    def add(self, key: Record, result: dict[str, Any]) -> None:
        """Keep a measurement, in place of one that failed."""
        self.records[:] = [each for each in self.records if not key.items() <= each.items()]
        self.records.append({**key, **result})
        self._report["machine"]["load_average_at_end"] = os.getloadavg()
        write_json(self._file, self._report)
