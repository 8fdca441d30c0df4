"""Makes the recipes' own modules importable: they are scripts beside their neighbours."""

from __future__ import annotations

import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
if str(RECIPES) not in sys.path:
    sys.path.insert(0, str(RECIPES))
