"""The contents of slots and the states of environments, as tensors that a state dict can hold."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from torchrl_hts._rounds.keys import Key

__all__ = ["pack", "recut", "to_bytes", "to_tensor", "unpack"]


def pack(fields: Mapping[Key, Tensor]) -> dict[str, Tensor]:
    """The contents of a slot, compressed: most of it are observations, stored twice."""
    return {"/".join(key): _compress(_bits(value)) for key, value in fields.items()}


def unpack(packed: Mapping[str, Tensor], fields: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """What was packed, in the shapes and data types of a slot's fields."""
    contents = {name: _decompress(value) for name, value in packed.items()}
    return {
        key: to_tensor(contents["/".join(key)]).view(value.dtype).view(value.shape)
        for key, value in fields.items()
    }


def recut(
    packed: Sequence[Mapping[str, Tensor]], num_envs: int, first: int, count: int
) -> dict[str, Tensor]:
    """Some environments' share of a round, out of what several learners have packed.

    Args:
        packed: their slots, whose environments follow each other.
        num_envs: how many those are together.
        first, count: which of them.

    Example:
        >>> slots = [pack({("reward",): torch.arange(4.0).view(2, 2) + 4 * i}) for i in (0, 1)]
        >>> middle = recut(slots, num_envs=4, first=1, count=2)
        >>> unpack(middle, {("reward",): torch.zeros(2, 2)})["reward",].tolist()
        [[2.0, 3.0], [4.0, 5.0]]
    """
    found = {}
    for name in packed[0]:
        whole = b"".join(_decompress(slot[name]) for slot in packed)
        size = len(whole) // num_envs  # of an environment's steps, which lie together
        found[name] = _compress(whole[first * size : (first + count) * size])
    return found


def to_tensor(state: bytes) -> Tensor:
    """Bytes in the form that every way to save a state dict can handle."""
    return torch.tensor(np.frombuffer(state, np.uint8))


def to_bytes(state: Tensor) -> bytes:
    """The inverse of `to_tensor`.

    Raises:
        TypeError: if it is no tensor.
    """
    if not isinstance(state, Tensor):
        raise TypeError(
            "expected a state as a tensor of bytes, as save() returns it, or an entry of "
            f"state_dict()['environments']; got {type(state).__name__}"
        )
    return bytes(state.cpu().numpy().data)


def _bits(value: Tensor) -> bytes:
    return to_bytes(value.reshape(-1).view(torch.uint8))


def _compress(content: bytes) -> Tensor:
    return to_tensor(zlib.compress(content, 1))


def _decompress(packed: Tensor) -> bytes:
    return zlib.decompress(to_bytes(packed))
