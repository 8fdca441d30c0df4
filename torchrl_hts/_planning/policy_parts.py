"""What a policy is made of: what actors can't hold is refused, and what they couldn't follow.

Actors are given copies of its parameters and buffers at the start of each round, and of nothing
else.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchrl_hts._planning.pickling import parts
from torchrl_hts._rounds.slots import check_storable

__all__ = ["check_tensors", "networks_in", "refused_strangers"]

_REMEDY = "make it a dense tensor of a common type"
_DEPTH = 4  # how far into a callable, a list or another object networks are looked for
_MOST = 10_000  # parts that are looked at


def check_tensors(policy: nn.Module, why_lazy: Exception | None = None) -> None:
    """Raise if a parameter or buffer has no value yet, or is of a kind that no slot holds.

    Args:
        policy: the policy.
        why_lazy: why lazy parameters could not be initialised.

    Raises:
        ValueError: for lazy parameters, and for those on the meta device.
        TypeError: for a layout or data type that shared memory can't hold.
    """
    all_tensors = (*policy.named_parameters(), *policy.named_buffers())
    lazy = [name for name, value in all_tensors if is_lazy(value)]
    if lazy:
        advice = "give it to a collector first, or run it once on a batch like"
        if why_lazy is not None:
            advice = f"({type(why_lazy).__name__}: {why_lazy}): run it once before, on a batch like"
        raise ValueError(
            f"the policy has lazy parameters ({', '.join(lazy[:3])}, ...) that can't be "
            f"initialised here{': ' if why_lazy is None else ' '}{advice} env.fake_tensordict()"
        ) from why_lazy
    for kind, named in (
        ("parameter", policy.named_parameters()),
        ("buffer", policy.named_buffers()),
    ):
        for name, tensor in named:
            what = f"the policy's {kind} {name!r}"
            if tensor.is_meta:
                raise ValueError(
                    f"{what} is on the meta device, so it has no values: give the policy some, "
                    "with policy.to_empty(device='cpu') and load_state_dict"
                )
            check_storable(what, tensor, _REMEDY)
            if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
                raise TypeError(f"{what} is {tensor.dtype}, which torch can't pickle: {_REMEDY}")


def networks_in(
    value: Any, name: str, *, into_classes: bool = False
) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Modules with parameters, and parameters, that lie within, some levels deep, with their names.

    Args:
        value: a callable or another object; of a module what isn't registered with it.
        name: what it is called.
        into_classes: also look at what the methods of classes name, but of torch's and TorchRL's.
    """
    level: list[tuple[str, Any]] = [(name, value)]
    seen = {id(value)}
    for _ in range(_DEPTH):
        below = []
        for outer, holder in level:
            for inner, part in _parts(holder, outer, into_classes=into_classes):
                if id(part) in seen or isinstance(part, type | types.ModuleType):
                    continue
                seen.add(id(part))
                if isinstance(part, nn.Parameter) or (
                    isinstance(part, nn.Module) and next(part.parameters(), None) is not None
                ):
                    yield inner, part
                else:
                    below.append((inner, part))
                if len(seen) > _MOST:
                    return
        level = below


def _parts(value: Any, name: str, *, into_classes: bool) -> Iterator[tuple[str, Any]]:
    """What something holds; of a module what isn't registered with it."""
    if isinstance(value, Tensor | str | bytes):
        return
    if isinstance(value, Mapping) and not isinstance(value, dict):  # it may read files
        return
    if isinstance(value, nn.Module):
        for attribute, part in vars(value).items():
            if attribute not in _REGISTERED:
                yield f"{name}.{attribute}", part
    else:
        yield from parts(value, name)
    if isinstance(value, types.FunctionType):
        yield from _of_python_modules(value, name)
    elif isinstance(value, types.MethodType):
        yield name, value.__func__
    elif into_classes:
        for cls in type(value).__mro__:
            if cls.__module__.partition(".")[0] not in _KNOWN:
                yield from ((f"{name}.{attribute}", part) for attribute, part in vars(cls).items())


def _of_python_modules(function: types.FunctionType, name: str) -> Iterator[tuple[str, Any]]:
    """What a function may use of the Python modules that it names."""
    names = function.__code__.co_names
    for variable in names:
        module = function.__globals__.get(variable)
        if isinstance(module, types.ModuleType):
            for attribute in names:
                if attribute in vars(module):
                    yield f"{name}: {variable}.{attribute}", vars(module)[attribute]


# Whose classes hold and name no networks of users.
_KNOWN = {"builtins", "collections", "functools", "numpy", "tensordict", "torch", "torchrl"}
_KNOWN |= {"torchrl_hts", "types"}
_REGISTERED = {*vars(nn.Module())} - {"training"}  # what torch keeps modules and hooks in


@contextmanager
def refused_strangers(policy: nn.Module) -> Iterator[None]:
    """Raise TypeError if what runs inside uses a network that the policy has not registered.

    Actors would keep the copy that they get at the start. One that can't be trained may be used.
    """
    own = {id(parameter) for parameter in policy.parameters()}
    strangers: dict[int, tuple[str, str]] = {}
    for outer, module in policy.named_modules():
        where = f"policy.{outer}" if outer else "policy"
        for name, part in networks_in(module, where, into_classes=True):
            for tensor in part.parameters() if isinstance(part, nn.Module) else [part]:
                # Shapes without values are those that an ensemble fills with its own.
                if tensor.requires_grad and not tensor.is_meta and id(tensor) not in own:
                    strangers.setdefault(id(tensor), (name, type(part).__name__))
    if not strangers:
        yield
        return
    with _Watch(strangers) as watch:
        yield
    for name, kind in watch.used:
        raise TypeError(
            f"the policy uses a {kind} that is not registered where it is used ({name}): actors "
            "would keep the copy that they get at the start, whatever is learned. Make it an "
            "attribute of an nn.Module, put it into an nn.ModuleList or nn.ParameterList instead "
            "of a list, or give TensorDictModule the module itself instead of a function or "
            "method that uses it. If it is not learned, freeze it with requires_grad_(False)"
        )


class _Watch(TorchFunctionMode):
    """Notes which of some tensors are used.

    Args:
        names: of each tensor, by its id.

    Attributes:
        used: the names of those.
    """

    def __init__(self, names: Mapping[int, tuple[str, str]]) -> None:
        super().__init__()
        self._names = names
        self.used: list[tuple[str, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {} if kwargs is None else kwargs
        for value in tree_leaves((args, named)):
            if id(value) in self._names and isinstance(value, Tensor):
                self.used.append(self._names[id(value)])
        return func(*args, **named)
