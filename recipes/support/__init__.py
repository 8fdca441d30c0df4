"""What the recipes share: options, networks, PPO, metrics, checkpoints, and the loop's frame."""

from __future__ import annotations

import importlib.util
import sys

for _package in ("matplotlib", "rich"):
    if importlib.util.find_spec(_package) is None:
        sys.exit(
            f"error: the recipes need the package {_package}, which is not installed: "
            "pip install 'torchrl_hts[recipes]'"
        )
