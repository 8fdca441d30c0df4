"""Options of a recipe that is none, and the directory that its run has left."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import script_paths  # noqa: F401  so that the scripts are found
from support.options import RunOptions, option, to_json


@dataclass(frozen=True)
class Options(RunOptions):
    """Options of a recipe for tests."""

    steps: int = option(3, "how many", most=100)
    rate: float = option(0.5, "how fast, in % of the most")
    fast: bool = option(False, "whether")
    goal: float | None = option(None, "how much")
    kind: Literal["a", "b"] = option("a", "which")
    workers: int = option(1, "how many at a time", may_change=True, least=1)


def saved_run(directory: Path, **changes: object) -> Path:
    """Write the configuration of a run, with some options changed."""
    config = {"recipe": "r", "options": {**to_json(Options(steps=9, rate=0.25)), **changes}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
