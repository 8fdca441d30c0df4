"""Which round a batch is of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_hts.errors.batches import check_batch

__all__ = ["check_version"]


def check_version(batch: Any, round_: int) -> None:
    """Raise unless a batch is that of a round.

    Raises:
        TypeError: if it is no batch.
        KeyError: if it has no ``"policy_version"`` of integers.
        ValueError: if a step of it is of another round, or there is no step.
    """
    check_batch(batch)
    version = batch.get("policy_version", None)
    if not _is_of_integers(version):
        found = "none" if version is None else getattr(version, "dtype", type(version).__name__)
        raise KeyError(
            'the batch needs an integer tensor "policy_version", the round it was gathered in; '
            f"found {found}. Gather it with HTSCollector, keep the key wherever keys are "
            'selected, or write "with delayed:" for no check.'
        )
    mask = batch.get(("collector", "mask"), None)
    if mask is not None:
        version = version[mask.bool().reshape(version.shape)]
    if not version.numel():
        raise ValueError("the batch has no step: train on whole rounds.")
    if not bool((version == round_).all()):
        versions = ", ".join(map(str, sorted(set(version.flatten().tolist()))))
        raise ValueError(
            f"expected a batch of policy version {round_}, found {versions}. Train on whole "
            "rounds, each exactly once and in order; when resuming, load the states of collector "
            "and DelayedGradient that were saved together."
        )


def _is_of_integers(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()
