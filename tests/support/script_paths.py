"""Makes the modules of recipes and benchmarks importable: scripts beside their neighbours."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES, BENCHMARKS = ROOT / "recipes", ROOT / "benchmarks"
QUICK_START = Path(__file__).with_name("quick_start.py")
for folder in (RECIPES, BENCHMARKS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
