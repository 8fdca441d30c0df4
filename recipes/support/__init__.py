"""What the recipes share: options, networks, PPO, metrics, checkpoints, and the loop's frame."""

from __future__ import annotations

import importlib.util
import sys
from types import TracebackType


def _say_what_ended(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Of a Ctrl-C while modules are imported, no more than that."""
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted before the run began", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _say_what_ended  # as early as can be: a recipe imports this first

for _package in ("matplotlib", "rich"):
    if importlib.util.find_spec(_package) is None:
        sys.exit(
            f"error: the recipes need the package {_package}, which is not installed: "
            "pip install 'torchrl_hts[recipes]'"
        )
