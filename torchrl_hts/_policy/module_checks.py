"""Modules that make a row depend on more than itself: they mix rows, drop activations, or count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from torch import nn
from torch.overrides import TorchFunctionMode
from torchrl.modules import ConsistentDropout

from torchrl_hts._policy.row_bits import row_bits
from torchrl_hts.errors import PolicyError

__all__ = ["check_modules", "mixing_modules", "refused_dropout", "unchanged_buffers"]


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
    """Raise PolicyError for a module that is lazy, changes itself, or drops activations at random.

    Example:
        >>> check_modules(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval())
    """
    dropouts = nn.modules.dropout._DropoutNd
    for name, module in policy.named_modules():
        where = f"{name or 'policy'} ({type(module).__name__})"
        if any(nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            raise PolicyError(f"{where} has uninitialised parameters: run the policy once before")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise PolicyError(
                f"{where} rescales its weights in a forward pass (max_norm), and actors share "
                "them: leave max_norm out, and bound the weights where they are learned"
            )
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


def refused_dropout(policy: nn.Module) -> AbstractContextManager[object]:
    """Raise PolicyError if what runs inside drops activations by one of torch's functions.

    No module shows that. A policy with a `ConsistentDropout`, which calls them too, is let pass.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 2)
        >>> with refused_dropout(net):
        ...     y = nn.functional.dropout(net(torch.zeros(1, 2)), training=False)
    """
    consistent = any(isinstance(module, ConsistentDropout) for module in policy.modules())
    return nullcontext() if consistent else _RefusedDropout()


class _RefusedDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {} if kwargs is None else kwargs
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            given = {**dict(zip(("p", "training"), args[1:3], strict=False)), **named}
            drops = given.get("training", given.get("train", True))
            dropped = drops and given.get("p", 0.5)
        elif name == "scaled_dot_product_attention":
            dropped = args[4] if len(args) > 4 else named.get("dropout_p", 0)
        else:
            dropped = 0
        if dropped:
            raise PolicyError(
                f"the policy drops activations at random, by {name}: it would act with another "
                "network at every step. Let it do so where self.training is True alone, and call "
                "policy.eval()"
            )
        return func(*args, **named)


@contextmanager
def unchanged_buffers(policy: nn.Module) -> Iterator[None]:
    """Raise PolicyError if what runs inside changes a buffer of the policy.

    Example:
        >>> with unchanged_buffers(nn.BatchNorm1d(2).eval()) as _:
        ...     pass
    """
    before = {name: row_bits([buffer[None]]) for name, buffer in policy.named_buffers()}
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" in str(error):  # by batch normalisation that trains
            _check_buffers(policy, before)
        raise
    _check_buffers(policy, before)


def _check_buffers(policy: nn.Module, before: Mapping[str, np.ndarray[Any, Any]]) -> None:
    for name, buffer in policy.named_buffers():
        if name not in before or not np.array_equal(row_bits([buffer[None]]), before[name]):
            path, _, leaf = name.rpartition(".")
            module = policy.get_submodule(path)
            instead = "make it compute without a change of buffers"
            if hasattr(module, "running_mean"):
                instead = "normalise in the environment instead"
            raise PolicyError(
                f"{path or 'policy'} ({type(module).__name__}) changes its buffer {leaf!r} in a "
                "forward pass, so actions would depend on what was served before. Put it in "
                f"evaluation mode (policy.eval()) before the collector is made, or {instead}"
            )
