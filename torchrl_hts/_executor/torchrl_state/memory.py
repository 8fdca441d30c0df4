"""The memory of tensors and arrays in a state: each piece once, whatever shares it.

A tensor and an array may be views of one memory (``torch.from_numpy``), and are again when they are
read.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_hts.errors import CannotSaveError

__all__ = ["MemoryReader", "MemoryWriter", "dtype_of"]

Place = list[int]  # where a value begins: an address; in a state the piece, and the byte within it


class MemoryWriter:
    """Collects the memory of what is being saved; nothing may change it before `finish`."""

    def __init__(self) -> None:
        self._places: list[tuple[Place, int]] = []  # and what they must be a multiple of
        self._ranges: list[tuple[int, int]] = []
        self._alive: list[Any] = []  # copies, which are looked at later
        self._of_device: dict[tuple[str, int], Any] = {}

    def tensor(self, value: Tensor) -> Place:
        """Where a tensor begins."""
        storage = value.untyped_storage()
        if value.device.type != "cpu":
            key = str(value.device), storage.data_ptr()
            if key not in self._of_device:
                self._of_device[key] = storage.cpu()  # type: ignore[no-untyped-call]
            storage = self._of_device[key]
        self._alive.append(storage)
        start, offset = storage.data_ptr(), int(value.storage_offset()) * value.element_size()
        end = start + storage.nbytes()
        return self._place(start + offset, start, end, value.element_size())

    def array(self, value: np.ndarray[Any, Any]) -> Place:
        """Where the first item of an array is."""
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        self._alive.append(owner)
        return self._place(value.__array_interface__["data"][0], *_range(owner), 1)

    def _place(self, address: int, start: int, end: int, multiple_of: int) -> Place:
        place = [address]
        if start < end:
            self._ranges.append((start, end))
            self._places.append((place, multiple_of))
        else:
            place[:] = [-1, 0]
        return place

    def finish(self) -> list[bytes]:
        """The pieces; every place is then within one of them.

        Raises:
            CannotSaveError: if a tensor lies at an odd place of an array's memory.
        """
        ends: dict[int, int] = {}  # by where pieces start
        last = -1
        for start, end in sorted(self._ranges):
            if last < 0 or start >= ends[last]:
                last = start
            ends[last] = max(end, ends.get(last, end))
        starts = list(ends)
        numbers: dict[int, int] = {}  # in the order of the values, whatever their addresses
        for place, multiple_of in self._places:
            start = starts[bisect_right(starts, place[0]) - 1]
            if (place[0] - start) % multiple_of:
                raise CannotSaveError("a tensor in it begins within an item of an array's memory")
            place[:] = [numbers.setdefault(start, len(numbers)), place[0] - start]
        return [ctypes.string_at(start, ends[start] - start) for start in numbers]


class MemoryReader:
    """Makes tensors and arrays over new memory with the content of the pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [_memory(piece) for piece in pieces]
        self._nothing = torch.empty(0, dtype=torch.uint8)
        self._on_device: dict[tuple[int, str], Tensor] = {}

    def tensor(
        self, place: Place, dtype: str, size: tuple[int, ...], stride: tuple[int, ...], device: str
    ) -> Tensor:
        """A tensor."""
        kind = dtype_of(dtype)
        piece, offset = place
        memory = self._pieces[piece] if piece >= 0 else self._nothing
        if device != "cpu":
            memory = self._on_device.setdefault((piece, device), memory.to(device))
        value = torch.empty(0, dtype=kind, device=device)
        return value.set_(memory.untyped_storage(), offset // value.element_size(), size, stride)

    def array(
        self, place: Place, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        """An array."""
        piece, offset = place
        if piece < 0:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, self._pieces[piece].numpy(), offset, strides)


def dtype_of(name: str) -> torch.dtype:
    """A data type of torch by its name."""
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no data type {name}")
    return found


def _memory(piece: bytes) -> Tensor:
    memory = torch.empty(len(piece), dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(piece, np.uint8)
    return memory


def _range(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The addresses from the first byte of an array to behind its last."""
    first = last = array.__array_interface__["data"][0]
    if array.size == 0:
        return first, first
    for count, stride in zip(array.shape, array.strides, strict=True):
        first += min(0, (count - 1) * stride)
        last += max(0, (count - 1) * stride)
    return first, last + array.itemsize
