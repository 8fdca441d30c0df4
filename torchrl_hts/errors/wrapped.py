"""The check of modules whose parts add up gradients by themselves; needs torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

__all__ = ["check_unwrapped", "is_sharded"]


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP has spread a module's parameters over processes, in one of its two forms."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which takes long to import
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel | fsdp.FSDPModule)


def check_unwrapped(module: nn.Module) -> None:
    """Raise ValueError if a module or a part of it adds up gradients by itself.

    Args:
        module: what is trained. TorchRL's losses keep networks in attributes where `nn.Module`
            doesn't look for parts; those are looked at too.

    Example:
        >>> check_unwrapped(nn.Sequential(nn.Linear(2, 1)))
    """
    for name, part in _parts(module):
        what = f"the module's part {name!r}" if name else "the module"
        kind = type(part).__name__
        if isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{what} is wrapped in {kind}, which adds up gradients by itself: have what it "
                "wraps, its .module, in its place"
            )
        if is_sharded(part) or any(map(_is_shared_out, part.parameters(recurse=False))):
            raise ValueError(
                f"{what} is sharded ({kind}), which adds up gradients by itself: train the module "
                "as it was before"
            )


def _is_shared_out(parameter: nn.Parameter) -> bool:
    """Whether processes have a part of it each, by tensor parallelism say."""
    tensor = sys.modules.get("torch.distributed.tensor")  # imported by whoever has made one
    return tensor is not None and isinstance(parameter, tensor.DTensor)


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module.named_modules():
        yield name, part
        for attribute, hidden in vars(part).items():
            if isinstance(hidden, nn.Module):
                yield from hidden.named_modules(prefix=f"{name}.{attribute}".lstrip("."))
