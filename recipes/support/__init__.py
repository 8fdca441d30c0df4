"""What the recipes share: options, networks, PPO, metrics, checkpoints, and the loop's frame."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from types import TracebackType


def _say_what_ended(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Of a Ctrl-C while modules are imported, no more than that."""
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted before the run began", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _open_what_is_closed() -> None:
    """Have standard streams that lead nowhere for those that this process was started without.

    As by ``cmd <&- >&- 2>&-``. In this order they get the descriptors that they would have.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  to the end of the process
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


_open_what_is_closed()
sys.excepthook = _say_what_ended  # as early as can be: a recipe imports this first

for _package in ("matplotlib", "rich"):
    if importlib.util.find_spec(_package) is None:
        sys.exit(
            f"error: the recipes need the package {_package}, which is not installed: pip install "
            + shlex.quote(f"{Path(__file__).parents[2]}[recipes]")
        )
