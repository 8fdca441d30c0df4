"""TorchRL's loggers, made from the options of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger

from support.errors import RecipeError
from support.options import RunOptions, to_json

__all__ = ["make_logger"]


def make_logger(options: RunOptions, output_dir: Path, run_id: str) -> Logger | None:
    """The logger that ``--logger`` names; None for ``none``.

    Args:
        options: of the run; W&B stores them with it.
        output_dir: of the run; loggers that write files do it there.
        run_id: the same for a run and its resumptions, which then are one run at W&B.

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
    return _wandb(options, output_dir, run_id)


def _wandb(options: RunOptions, output_dir: Path, run_id: str) -> Logger:
    _require("wandb")
    import wandb
    from torchrl.record.loggers.wandb import WandbLogger

    offline = options.wandb_mode == "offline"
    settings: dict[str, Any] = {"group": options.wandb_group, "config": to_json(options)}
    try:
        if not offline and not wandb.login(prompt=False):
            raise RecipeError(
                "Weights & Biases has no API key: run 'wandb login', set WANDB_API_KEY, or pass "
                "--wandb-mode offline"
            )
        return WandbLogger(
            exp_name=options.wandb_name or output_dir.name,
            offline=offline,
            save_dir=str(output_dir),
            id=run_id,
            project=options.wandb_project,
            **settings,
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
