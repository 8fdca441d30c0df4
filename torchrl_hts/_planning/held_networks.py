"""Networks within environments, whose copies are stepped: what is learned doesn't reach these."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torchrl.data.utils import CloudpickleWrapper
from torchrl.envs import EnvBase, EnvCreator
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_hts._executor.torchrl_layers import base_of
from torchrl_hts._planning.pickling import parts

__all__ = ["warn_of_networks"]

_MOST = 10_000  # parts that are looked at
_FOLLOWED = (functools.partial, types.FunctionType, nn.Module, EnvCreator, list, tuple)


def warn_of_networks(create_env_fn: Any, create_env_kwargs: Any = None, *, stacklevel: int) -> None:
    """Warn where environments, or what makes them, hold a network that can be trained.

    Looked at are environments themselves, and what functions and partials name. Other objects that
    these lead to are not: one of a script's own may hold anything.

    Args:
        create_env_fn, create_env_kwargs: of a collector.
        stacklevel: of the warning, from here.
    """
    seen: set[int] = set()
    found = [
        *_networks(create_env_fn, "create_env_fn", seen),
        *_networks(create_env_kwargs, "create_env_kwargs", seen),
    ]
    for where, network in found:
        if any(parameter.requires_grad for parameter in network.parameters()):
            warnings.warn(
                f"{where} ({type(network).__name__}) has parameters that can be trained. "
                "Environments are stepped in other processes, with the copy that they get now, "
                "whatever is learned: compute what it gives in postproc, in this process. If it is "
                "not learned, freeze it with requires_grad_(False)",
                stacklevel=stacklevel + 1,
            )
            return


def _networks(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(value) in seen or len(seen) > _MOST:
        return
    seen.add(id(value))
    if isinstance(value, EnvBase) and isinstance(base_of(value), BatchedEnvBase):
        batched = base_of(value)
        if batched is not value:
            yield name, value.transform
        yield from _networks(batched.create_env_fn, name, seen)
        yield from _networks(batched.create_env_kwargs, name, seen)
    elif isinstance(value, EnvCreator):
        yield from _networks(value.create_env_fn, name, seen)
        yield from _networks(value.create_env_kwargs, name, seen)
    elif isinstance(value, CloudpickleWrapper):
        yield from _networks(value.fn, name, seen)
    elif isinstance(value, nn.Module):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _networks(entry, f"{name}[{key!r}]", seen)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, entry in enumerate(value):
            yield from _networks(entry, f"{name}[{index}]", seen)
    elif isinstance(value, functools.partial | types.FunctionType):
        for inner, part in parts(value, name):
            if isinstance(part, _FOLLOWED):
                yield from _networks(part, inner, seen)
