"""Step times that football_steps.py has recorded, to be slept through again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

SLOWER = 3.0  # by default; so a few cores keep up with what 16 real ones do
Array = np.ndarray[Any, Any]


def read_record(parser: argparse.ArgumentParser, file: Path) -> dict[str, Any]:
    """What football_steps.py has written; ends the program, with a reason, if it isn't that."""
    try:
        record: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{file} can't be read ({error}): run football_steps.py first")
    results = record.get("results") if isinstance(record, dict) else None
    if not results:
        parser.error(f"{file} has no results of football_steps.py: run it first")
    if not all(each.get("step_us") and each.get("reset_us") for each in results.values()):
        parser.error(f"{file} lacks the times of single steps: run football_steps.py again")
    return record


def seconds_of(result: dict[str, Any], slower: float) -> Array:
    """The times of a scenario's steps, resets among them, in their order, made longer."""
    times: Array = slower * (np.array(result["step_us"]) + np.array(result["reset_us"])) / 1e6
    return times


def shares_of(record_s: Array, num_envs: int, num_steps: int) -> Array:
    """``[N, steps]``: for each environment its part of a record, from its own place on."""
    starts = np.arange(num_envs) * len(record_s) // num_envs
    shares: Array = record_s[(starts[:, None] + np.arange(num_steps)) % len(record_s)]
    return shares
