"""What a policy is made of: what actors can't hold is refused, and what they couldn't follow.

Actors are given copies of its parameters and buffers at the start of each round, and of nothing
else.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchrl_hts._planning.pickling import parts
from torchrl_hts._rounds.slots import check_storable

__all__ = ["check_tensors", "networks_in", "refused_strangers"]

_REMEDY = "make it a dense tensor of a common type"
_DEPTH = 4  # how far into a callable, a list or another object networks are looked for
_MOST = 10_000  # parts that are looked at


def check_tensors(policy: nn.Module) -> None:
    """Raise if a parameter or buffer has no value yet, or is of a kind that no slot holds.

    Raises:
        ValueError: for lazy parameters, and for those on the meta device.
        TypeError: for a layout or data type that shared memory can't hold.
    """
    lazy = [name for name, parameter in policy.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"the policy has lazy parameters ({', '.join(lazy[:3])}, ...): run it once on a batch "
            "like env.fake_tensordict() before it is given to the collector"
        )
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


def networks_in(value: Any, name: str) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Modules with parameters, and parameters, that lie within, some levels deep, with their names.

    Args:
        value: a callable or another object; of a module what isn't registered with it.
        name: what it is called.
    """
    level: list[tuple[str, Any]] = [(name, value)]
    seen = {id(value)}
    for _ in range(_DEPTH):
        below = []
        for outer, holder in level:
            for inner, part in _parts(holder, outer):
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


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What something holds; of a module what isn't registered with it."""
    if isinstance(value, Tensor | str | bytes):
        return
    if not isinstance(value, nn.Module):
        yield from parts(value, name)
        if isinstance(value, types.FunctionType):
            yield from _of_python_modules(value, name)
        return
    for attribute, part in vars(value).items():
        if attribute not in _REGISTERED:
            yield f"{name}.{attribute}", part


def _of_python_modules(function: types.FunctionType, name: str) -> Iterator[tuple[str, Any]]:
    """What a function may use of the Python modules that it names."""
    names = function.__code__.co_names
    for variable in names:
        module = function.__globals__.get(variable)
        if isinstance(module, types.ModuleType):
            for attribute in names:
                if attribute in vars(module):
                    yield f"{name}: {variable}.{attribute}", vars(module)[attribute]


_REGISTERED = {*vars(nn.Module())} - {"training"}  # what torch keeps modules and hooks in


@contextmanager
def refused_strangers(policy: nn.Module) -> Iterator[None]:
    """Raise TypeError if what runs inside uses a network that the policy has not registered.

    Actors would keep the copy that they get at the start. One that can't be trained may be used.
    """
    own = {id(parameter) for parameter in policy.parameters()}
    used: dict[str, type] = {}
    hooks = []

    def watch(name: str, network: nn.Module) -> None:
        def note(*_: Any) -> None:
            used.setdefault(name, type(network))

        hooks.append(network.register_forward_pre_hook(note))

    for outer, module in policy.named_modules():
        for name, part in networks_in(module, f"policy.{outer}" if outer else "policy"):
            if not any(id(tensor) not in own for tensor in _trained(part)):
                continue
            if isinstance(part, nn.Module):
                watch(name, part)
            else:
                used[name] = type(part)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for name, kind in used.items():
        raise TypeError(
            f"the policy uses a {kind.__name__} that is not registered with it ({name}): actors "
            "would keep the copy that they get at the start, whatever is learned. Make it an "
            "attribute of an nn.Module, put it into an nn.ModuleList or nn.ParameterList instead "
            "of a list, or give TensorDictModule the module itself instead of a function that "
            "calls it"
        )


def _trained(part: nn.Module | nn.Parameter) -> list[Tensor]:
    """What an optimizer may change of it; shapes without values are none."""
    tensors = part.parameters() if isinstance(part, nn.Module) else [part]
    return [tensor for tensor in tensors if tensor.requires_grad and not tensor.is_meta]
