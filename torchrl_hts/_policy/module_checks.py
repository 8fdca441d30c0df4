"""Modules that make a row depend on more than itself: they mix rows, drop activations, or count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import nn
from torchrl.modules import ConsistentDropout

from torchrl_hts._policy.invariance import row_bits
from torchrl_hts.errors import PolicyError

__all__ = ["check_modules", "mixing_modules", "unchanged_buffers"]


def mixing_modules(policy: nn.Module) -> list[str]:
    """Names of the modules that mix the rows of a batch: batch normalisation by batch statistics.

    Example:
        >>> mixing_modules(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        ['1 (BatchNorm1d)']
    """
    return [
        f"{name or 'policy'} ({kind})"
        for name, module in policy.named_modules()
        if "BatchNorm" in (kind := type(module).__name__) or "BatchRenorm" in kind
        if module.training or getattr(module, "running_mean", None) is None
    ]


def check_modules(policy: nn.Module) -> None:
    """Raise PolicyError for a module that is lazy, or drops activations at random in training.

    Example:
        >>> check_modules(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval())
    """
    dropouts = nn.modules.dropout._DropoutNd
    for name, module in policy.named_modules():
        where = f"{name or 'policy'} ({type(module).__name__})"
        if any(nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            raise PolicyError(f"{where} has uninitialised parameters: run the policy once before")
        if not module.training or isinstance(module, ConsistentDropout):
            continue
        if (isinstance(module, dropouts) and module.p) or (
            isinstance(module, nn.RNNBase | nn.MultiheadAttention)
            and module.dropout
            and getattr(module, "num_layers", 2) > 1
        ):
            raise PolicyError(
                f"{where} is in training mode and drops activations at random: the policy would "
                "act with another network at every step. Call policy.eval() or set its p to 0"
            )


@contextmanager
def unchanged_buffers(policy: nn.Module) -> Iterator[None]:
    """Raise PolicyError if what runs inside changes a buffer of the policy.

    Example:
        >>> with unchanged_buffers(nn.BatchNorm1d(2).eval()) as _:
        ...     pass
    """
    before = {name: row_bits([buffer[None]]) for name, buffer in policy.named_buffers()}
    yield
    for name, buffer in policy.named_buffers():
        if name not in before or not np.array_equal(row_bits([buffer[None]]), before[name]):
            path, _, leaf = name.rpartition(".")
            kind = type(policy.get_submodule(path)).__name__
            raise PolicyError(
                f"{path or 'policy'} ({kind}) changes its buffer {leaf!r} in a forward pass, so "
                "actions would depend on what was served before. Put it in evaluation mode "
                "(policy.eval()), or normalise in the environment instead"
            )
