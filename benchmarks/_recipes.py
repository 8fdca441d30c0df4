"""Puts the recipes, and this checkout's package, on the path; import it before they are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent / "recipes"
PATHS = [str(HERE.parent), str(RECIPES), str(HERE)]
sys.path[:0] = [path for path in PATHS if path not in sys.path]


def environment() -> dict[str, str]:
    """This process's environment, for scripts that are to find the same recipes and package."""
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*PATHS, *([inherited] * bool(inherited))])}
