"""W&B's own environment variables, as far as a run can be spared a start by looking at them.

Nothing here imports torch, or W&B.
"""

from __future__ import annotations

import os
from pathlib import Path

from support.errors import RecipeError
from support.options import RunOptions
from support.output_dir import refuse_unwritable

__all__ = ["check_wandb_variables", "is_disabled"]

_TRUE = ("1", "on", "true", "y", "yes")
_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")


def is_disabled() -> bool:
    """Whether ``WANDB_DISABLED`` says so, as in older versions and other packages' integrations."""
    return os.environ.get("WANDB_DISABLED", "").lower() in _TRUE


def check_wandb_variables(options: RunOptions) -> None:
    """Raise RecipeError for a mode that W&B doesn't know, or a directory that can't be written to.

    Args:
        options: of a run, which may have nothing to do with W&B.
    """
    if options.logger != "wandb":
        return
    mode = os.environ.get("WANDB_MODE", "")
    if mode and mode not in _MODES:
        raise RecipeError(
            f"Weights & Biases knows no WANDB_MODE {mode!r}: set it to {', '.join(_MODES[:-1])} or "
            f"{_MODES[-1]}, or unset it"
        )
    directory = os.environ.get("WANDB_DIR")
    writes = (options.wandb_mode or ("disabled" if is_disabled() else mode)) != "disabled"
    if directory and writes:
        refuse_unwritable(Path(directory).expanduser(), "set WANDB_DIR to another, or unset it")
