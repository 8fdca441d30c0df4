"""Entries of TensorDicts that a batch can hold, and those that would be lost without a word."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor
from torchrl.data import Composite

from torchrl_hts._rounds.keys import Key, named
from torchrl_hts.errors import InvalidValueError

__all__ = ["check_alike", "check_fixed_shapes", "check_specified", "is_private", "leaves"]

Owner = Literal["environment", "policy"]


def is_private(key: Key) -> bool:
    """Whether TorchRL's collectors leave an entry out of their batches."""
    return any(name.startswith("_") for name in key)


def leaves(td: TensorDictBase, owner: Owner = "environment") -> Iterable[tuple[Key, Tensor]]:
    """The tensors of a TensorDict with their keys as tuples.

    Args:
        td: what the environment, or the policy, gives.
        owner: who gives it. What an environment keeps under a private name stays in its own
            TensorDict, and may be anything.

    Raises:
        TypeError: for an entry that is no plain tensor.
    """
    for path, value in _entries(td, ()):
        if isinstance(value, Tensor) and not value.is_nested and value.layout == torch.strided:
            yield path, value
        elif owner == "policy" or not is_private(path):
            raise _no_plain_tensor(path, value, owner)


def _entries(td: Any, path: Key) -> Iterable[tuple[Key, Any]]:
    if isinstance(td, LazyStackedTensorDict) and not _is_uniform(td):
        yield path, td
        return
    for name, value in td.items():
        if is_tensor_collection(value) and not is_non_tensor(value):
            yield from _entries(value, (*path, name))
        else:
            yield (*path, name), value


def _is_uniform(stack: LazyStackedTensorDict) -> bool:
    """Whether stacked TensorDicts have the same entries in the same shapes."""
    first, *others = map(_shapes, stack.tensordicts)
    return all(first == other for other in others)


def _shapes(td: TensorDictBase) -> dict[Key, Any]:
    return {path: getattr(value, "shape", None) for path, value in _entries(td, ())}


def _no_plain_tensor(path: Key, value: Any, owner: Owner) -> TypeError:
    below = path[1:] if path[0] == "next" else path
    name = named(below)
    kind = type(value).__name__
    if isinstance(value, Tensor):
        kind = "nested tensor" if value.is_nested else f"tensor of layout {value.layout}"
    advice = {
        "environment": f"leave it out with torchrl.envs.ExcludeTransform({name})",
        "policy": "let it write numbers, or leave it out with policy.select_out_keys",
    }
    return TypeError(
        f"the {owner}'s entry {name} is a {kind}; a batch of HTSCollector holds plain tensors of "
        f"fixed shapes: {advice[owner]}"
    )


def check_alike(td: TensorDictBase) -> None:
    """Refuse a batch of environments that differ in what they give.

    Args:
        td: a transition of the batch, ``[k]``.

    Raises:
        TypeError: with the keys.
    """
    for path, stack in _entries(td, ()):
        if isinstance(stack, LazyStackedTensorDict) and stack.stack_dim == 0:
            first, *others = map(_shapes, stack.tensordicts)
            keys = {(*path, *key) for other in others for key, _ in first.items() ^ other.items()}
            names = sorted({named(key[1:] if key[0] == "next" else key) for key in keys})
            raise TypeError(
                f"the environments of a batch differ in {', '.join(names)}: what they give must "
                "have the same names and shapes in all of them"
            )


def check_fixed_shapes(specs: Composite) -> None:
    """Refuse specs whose values differ in shape from step to step.

    Raises:
        TypeError: with the key.
    """
    for key, spec in specs.items(True, True):
        if any(size < 0 for size in spec.shape):
            path = tuple(name for name in key if not name.endswith("_spec"))
            name = named(path)
            raise TypeError(
                f"the spec of {name} has the shape {tuple(spec.shape)}; a batch of HTSCollector "
                "holds plain tensors of fixed shapes: pad it, or leave it out with "
                f"torchrl.envs.ExcludeTransform({name})"
            )


def check_specified(td: TensorDictBase, known: Collection[Key], prefix: Key = ()) -> None:
    """Refuse what an environment returns without having a spec for it.

    Args:
        td: what it returned.
        known: the keys that there are specs for, and those that others wrote.
        prefix: where `td` lies.

    Raises:
        InvalidValueError: with the key.
    """
    for path, _ in _entries(td, ()):
        if prefix + path not in known and not is_private(path):
            name = named(path)
            raise InvalidValueError(
                f"the environment returned {name}, for which it has no spec, so that a batch would "
                "lack it: add it to the environment's observation_spec, or, where a transform "
                "writes it, in the transform's transform_observation_spec"
            )
