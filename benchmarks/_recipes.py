"""Puts the recipes, and this checkout's package, on the path; import it before they are."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE.parent), str(HERE.parent / "recipes"), str(HERE)]
sys.path[:0] = [path for path in PATHS if path not in sys.path]
