"""TorchRL's loggers, made from the options of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger

from support.errors import RecipeError
from support.options import RunOptions, to_json
from support.wandb_variables import check_wandb_variables, is_disabled

__all__ = ["make_logger", "wandb_names"]

_DEFAULT_PROJECT = "torchrl_hts"


def make_logger(
    options: RunOptions, output_dir: Path, names: Mapping[str, Any] | None
) -> Logger | None:
    """The logger that ``--logger`` names; None for ``none``, and for a W&B that is disabled.

    Args:
        options: of the run; W&B stores them with it.
        output_dir: of the run; loggers that write files do it there, W&B where ``WANDB_DIR`` says.
        names: of the run at W&B, from `wandb_names`; None for other loggers.

    Raises:
        RecipeError: if its package is missing, or W&B can't be logged in to.
    """
    if options.logger == "none":
        return None
    if options.logger == "csv":
        from torchrl.record.loggers.csv import CSVLogger

        return CSVLogger(exp_name="csv", log_dir=str(output_dir))
    if options.logger == "tensorboard":
        _require("tensorboard")
        from torchrl.record.loggers.tensorboard import TensorboardLogger

        return TensorboardLogger(exp_name="tensorboard", log_dir=str(output_dir))
    assert names is not None
    return _wandb(options, output_dir, names)


def wandb_names(
    options: RunOptions, output_dir: Path, run_id: str, earlier: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Which run it is at W&B: its id, project, entity, group and name, for `wandb.init`.

    Options given come first. Then a run that is resumed keeps what it was, so that it goes on as
    the same run; a new one follows W&B's own variables and settings files.

    Args:
        options: of the run.
        output_dir: of the run, whose name is its name by default.
        run_id: of a new run where ``WANDB_RUN_ID`` is not set, and of one that is resumed.
        earlier: what this function has returned for the run before; None for a new run.

    Raises:
        RecipeError: if W&B is not installed, or refuses its settings.
    """
    check_wandb_variables(options)
    settings = _wandb_settings()
    if earlier is None:
        earlier = {
            "id": settings.run_id or run_id,
            "project": settings.project or _DEFAULT_PROJECT,
            "entity": settings.entity,
            "group": settings.run_group,
            "name": settings.run_name or output_dir.name,
            "resume": settings.resume or "allow",
        }
    else:
        earlier = {**earlier, "id": run_id, "resume": "allow"}
    given = {
        "project": options.wandb_project,
        "group": options.wandb_group,
        "name": options.wandb_name,
    }
    return {**earlier, **{name: value for name, value in given.items() if value is not None}}


def _wandb_settings() -> Any:
    """W&B's settings, of its environment variables and its settings files."""
    _require("wandb")
    import wandb
    from pydantic import ValidationError  # which W&B checks its settings with

    try:
        return wandb.setup().settings
    except (ValidationError, wandb.errors.Error) as error:
        wrong = str(error)
        if isinstance(error, ValidationError):
            wrong = "; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors())
        given = ", ".join(sorted(name for name in os.environ if name.startswith("WANDB_")))
        raise RecipeError(
            f"Weights & Biases refuses its settings: {wrong}. Check its settings files, and the "
            f"environment variables that are set: {given or 'none'}"
        ) from error


def _wandb_mode(options: RunOptions) -> str:
    """``--wandb-mode``, or else what W&B's own variables and settings files say."""
    if options.wandb_mode is not None:
        return options.wandb_mode
    if is_disabled():  # which today's W&B doesn't look at
        return "disabled"
    mode: str = _wandb_settings().mode
    return {"dryrun": "offline", "run": "online"}.get(mode, mode)


def _wandb(options: RunOptions, output_dir: Path, names: Mapping[str, Any]) -> Logger | None:
    mode = _wandb_mode(options)
    if mode == "disabled":
        return None
    import wandb
    from torchrl.record.loggers.wandb import WandbLogger

    others = {name: value for name, value in names.items() if name != "name"}
    try:
        if mode != "offline" and not wandb.login(prompt=False):
            raise RecipeError(
                "Weights & Biases has no API key: run 'wandb login', set WANDB_API_KEY, or pass "
                "--wandb-mode offline"
            )
        return WandbLogger(
            exp_name=names["name"],
            save_dir=None if os.environ.get("WANDB_DIR") else str(output_dir),
            mode=mode,
            config=to_json(options),
            **others,
        )
    except wandb.errors.Error as error:
        raise RecipeError(
            f"Weights & Biases can't be reached or refuses the run: {error}; check 'wandb login', "
            "or pass --wandb-mode offline"
        ) from error


def _require(package: str) -> None:
    try:
        __import__("torch.utils.tensorboard" if package == "tensorboard" else package)
    except ImportError as error:
        raise RecipeError(
            f"--logger {package} needs the package {package}, which is not installed: "
            f"pip install 'torchrl_hts[{package}]'"
        ) from error
