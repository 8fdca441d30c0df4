"""Which of a run's processes this is, and which start of torchrun it belongs to.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

__all__ = ["is_first", "is_first_here", "is_own", "launch_name", "own_run"]

_UNNAMED = "none"  # torchrun's --rdzv-id by default


def is_first() -> bool:
    """Whether this process is the one that prints and writes: rank 0, or alone."""
    return _number("RANK", "SLURM_PROCID") in (None, "0")


def is_first_here() -> bool:
    """Whether this process is the first of the run on its machine, or alone."""
    return _number("LOCAL_RANK", "SLURM_LOCALID") in (None, "0")


def _number(of_torchrun: str, of_srun: str) -> str | None:
    """As a launcher says it; World, which imports torch, says what is wrong with it."""
    number = os.environ.get(of_torchrun)
    if number is None and "SLURM_STEP_NUM_TASKS" in os.environ:  # not so in srun's own script
        number = os.environ.get(of_srun)
    return number


def launch_name() -> str | None:
    """What tells this start of torchrun from others, and not from its restarts; None without it."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name == _UNNAMED:
        return f"{socket.gethostname()} {os.getppid()}"
    return name


def is_own(directory: Path) -> bool:
    """Whether a directory holds a run that this start of torchrun has begun.

    A restart then goes on with it. ``--rdzv-id`` names the run, whoever starts it; without one it
    is the process of torchrun, whose number another may get later: that must be a restart.
    """
    name = launch_name()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if name is None or (os.environ["TORCHELASTIC_RUN_ID"] == _UNNAMED and restarts == "0"):
        return False
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError, RecursionError):  # whoever opens it says what is wrong
        return False
    return isinstance(config, dict) and config.get("launch") == name


def own_run(directory: Path, name: str) -> Path | None:
    """The newest run that this start of torchrun has begun, if there is one.

    Args:
        directory: that holds runs.
        name: that their directories' names begin with.
    """
    if launch_name() is None:
        return None
    newest_first = sorted(directory.glob(f"{name}-*"), reverse=True)
    return next(filter(is_own, newest_first), None)
