"""Tensors over the shared memory: one TensorDict ``[N, T]`` and one set of parameters per slot.

Axes: N environments, T = alpha steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchrl_hts._rounds.entries import is_private
from torchrl_hts._rounds.keys import Key, named
from torchrl_hts._rounds.shared_memory import Array, Field, SharedMemory

__all__ = [
    "Slots",
    "bind_parameters",
    "check_storable",
    "field_of",
    "policy_tensors",
    "tensor_over",
]


def tensor_over(array: Array, dtype: str) -> Tensor:
    """A tensor over the memory of an array."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def check_storable(what: str, value: Tensor, remedy: str) -> None:
    """Raise TypeError for a tensor that has no place in an array.

    Args:
        what: what it is called.
        value: any.
        remedy: what to do.

    Example:
        >>> check_storable("it", torch.zeros(2).to_sparse(), "make it dense")
        Traceback (most recent call last):
        TypeError: it is a tensor of layout torch.sparse_coo and torch.float32, ...: make it dense
    """
    dtype = str(value.dtype).removeprefix("torch.")
    is_dense = value.layout is torch.strided and not value.is_nested and not value.is_quantized
    if not is_dense or (dtype != "bfloat16" and not hasattr(np, dtype.replace("bool", "bool_"))):
        raise TypeError(
            f"{what} is a tensor of layout {'nested' if value.is_nested else value.layout} and "
            f"{value.dtype}, which memory that processes share can't hold here: {remedy}"
        )


def field_of(key: Key, value: Tensor, batch_dims: int) -> Field:
    """The field that holds one transition of a value.

    Raises:
        TypeError: for a layout or data type that shared memory can't hold.
    """
    check_storable(f"the entry {named(key)}", value, "make it a dense tensor of a common type")
    return Field(key, tuple(value.shape[batch_dims:]), str(value.dtype).removeprefix("torch."))


def policy_tensors(policy: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a policy, each once, with their names: what makes up theta."""
    named: list[tuple[str, Tensor]] = [*policy.named_parameters(), *policy.named_buffers()]
    return [(name, tensor.detach()) for name, tensor in named]


class Slots:
    """The slots as the learner and the actors see them.

    Attributes:
        fields: for each slot, its tensors ``[N, T, *shape]`` by key.
        batches: for each slot, the same as a TensorDict ``[N, T]`` with names ``(None, "time")``,
            without those that are private: what a policy leaves for itself under a ``"_name"``. A
            group of agents is a TensorDict ``[N, T, agents]`` within.
        parameters: for each slot, its behaviour parameters and buffers.
    """

    def __init__(self, memory: SharedMemory) -> None:
        layout = memory.layout
        self.fields: list[dict[Key, Tensor]] = []
        self.batches: list[TensorDict] = []
        self.parameters: list[list[Tensor]] = []
        dtypes = {field.key: field.dtype for field in layout.fields}
        for slot in range(layout.num_slots):
            tensors = {
                key: tensor_over(array, dtypes[key]) for key, array in memory.fields(slot).items()
            }
            self.fields.append(tensors)
            public = {key: tensor for key, tensor in tensors.items() if not is_private(key)}
            batch = _nest(public, [layout.num_envs, layout.sync_interval])
            for key, size in layout.groups:
                group = batch.get(key, None)
                # The policy may have written what is not of each agent there.
                with contextlib.suppress(RuntimeError):
                    if group is not None:
                        group.batch_size = [*batch.batch_size, *size]
            self.batches.append(batch)
            self.parameters.append(
                [
                    tensor_over(array, field.dtype)
                    for array, field in zip(memory.parameters(slot), layout.parameters, strict=True)
                ]
            )

    @torch.no_grad()
    def write_parameters(self, slot: int, values: Sequence[Tensor]) -> None:
        """Copy parameters into a slot, whose round must not be open (I2)."""
        own = self.parameters[slot]
        if own and values is not own:  # a learner that stages early writes to the slot itself
            torch._foreach_copy_(own, list(values))


def _nest(tensors: dict[Key, Tensor], batch_size: list[int]) -> TensorDict:
    nested: dict[str, Any] = {}
    for key, tensor in tensors.items():
        level = nested
        for name in key[:-1]:
            level = level.setdefault(name, {})
        level[key[-1]] = tensor
    return TensorDict(nested, batch_size, names=[None, "time"])


def bind_parameters(
    module: nn.Module, shared: Sequence[Tensor], device: torch.device
) -> Callable[[], None] | None:
    """Make a module use a slot's parameters.

    On the CPU its tensors are put over the slot's memory. On another device they are copied: the
    function that is returned does it, once per round.
    """
    if device.type != "cpu":
        own = [tensor for _, tensor in policy_tensors(module)]

        def refresh() -> None:
            for target, source in zip(own, shared, strict=True):
                target.copy_(source)

        return refresh
    over = dict(zip((name for name, _ in policy_tensors(module)), shared, strict=True))
    for name, parameter in module.named_parameters():
        parameter.data = over[name]
    for name, buffer in module.named_buffers():
        buffer.data = over[name]
    return None
