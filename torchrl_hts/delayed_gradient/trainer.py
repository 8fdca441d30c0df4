"""What a `DelayedGradient` asks of a trainer, alone or as one of many learners."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrl.trainers import Trainer

from torchrl_hts.delayed_gradient.trainer_of_many import TrainerOfMany

__all__ = ["check_is_trainer", "check_trainer", "many_of"]


def check_is_trainer(trainer: Any) -> None:
    """Raise TypeError for what nothing can be registered with."""
    if not isinstance(trainer, Trainer):
        raise TypeError(
            "register takes a trainer of TorchRL (torchrl.trainers.Trainer), and got "
            f"{type(trainer).__name__}: without one, write the loop yourself"
        )


def check_trainer(trainer: Trainer, loss_module: nn.Module) -> None:
    """Raise ValueError unless the trainer trains these parameters, here, batch by batch."""
    if trainer.learner_backend != "local" or trainer.async_collection:
        raise ValueError(
            "DelayedGradient needs a trainer that trains on each batch as it comes: "
            "learner_backend='local' and async_collection=False."
        )
    if isinstance(trainer.loss_module, nn.Module):
        trained = {id(parameter) for parameter in trainer.loss_module.parameters()}
        if not trained >= {id(parameter) for parameter in loss_module.parameters()}:
            raise ValueError(
                "DelayedGradient has other parameters than the trainer's loss module. "
                "Construct it with trainer.loss_module, or with the policy that this trains."
            )


def many_of(trainer: Trainer) -> TrainerOfMany | None:
    """What makes the trainer one of its collector's world; None if it learns alone.

    Raises:
        ValueError: if it can't be one of many.
    """
    world: Any = getattr(trainer.collector, "world", None)
    return None if world is None or world.num_parts == 1 else TrainerOfMany(trainer, world)
