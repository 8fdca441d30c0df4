"""Reads what `StateWriter` has written into another environment of the same make.

All is read before anything is changed. A state runs no code that comes with it: functions and
classes are those that the new environment holds.
"""

from __future__ import annotations

import enum
import functools
import random
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import nn

from torchrl_hts._executor.torchrl_state.memory import MemoryReader, dtype_of
from torchrl_hts._executor.torchrl_state.objects import (
    ATOMS,
    class_name,
    is_harmless,
    made_anew,
    set_attributes,
)
from torchrl_hts._executor.torchrl_state.writer import Record, StateWriter
from torchrl_hts.env_state.functions import restore

__all__ = ["StateReader"]

_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "Size": torch.Size}
_MAPPINGS: dict[str, Callable[[], Any]] = {"dict": dict, "OrderedDict": OrderedDict}
_BITS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


class StateReader:
    """Reads records in the order in which they were written.

    Args:
        new: what was met in the environment that is to take the state.
        pieces: the memory of tensors and arrays.
    """

    def __init__(self, new: StateWriter, pieces: list[bytes]) -> None:
        self._new = new
        self._memory = MemoryReader(pieces)
        self._read: list[Any] = []
        self._alive: list[Any] = []
        self._changes: list[Callable[[], object]] = []
        self._fills: list[Callable[[], object]] = []

    def read(self, record: Record) -> Any:
        """What a record is of.

        Raises:
            ValueError: if the environment lacks what it takes.
        """
        if type(record) in ATOMS:
            return record
        kind, *parts = record
        if kind == "=":
            return self._read[parts[0]]
        number = len(self._read)
        self._read.append(None)
        self._read[number] = value = self._of(kind, number, parts)
        return value

    def apply(self) -> None:
        """Change the environment: first its objects, then dicts, whose keys may be objects."""
        for change in (*self._changes, *self._fills):
            change()

    def _of(self, kind: str, number: int, parts: list[Any]) -> Any:
        method = getattr(self, f"_{kind}", None)
        if kind in _SEQUENCES or kind in ("list", "deque"):
            return self._sequence(kind, number, *parts)
        if kind in _MAPPINGS:
            self._read[number] = mapping = _MAPPINGS[kind]()
            self._fill(mapping, parts[0])
            return mapping
        if kind not in _KINDS or method is None:
            raise ValueError(f"there is no kind {kind!r}")
        return method(number, *parts)

    def _sequence(self, kind: str, number: int, items: list[Record], most: int | None) -> Any:
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([self.read(each) for each in items])
        value: Any = [] if kind == "list" else deque(maxlen=most)
        self._read[number] = value
        for each in items:
            value.append(self.read(each))
        return value

    def _fill(self, mapping: Any, pairs: list[Record]) -> None:
        read = [(self.read(key), self.read(value)) for key, value in pairs]
        update = OrderedDict.update if type(mapping) is OrderedDict else dict.update
        self._fills.append(lambda: update(mapping, OrderedDict(read)))

    def _defaultdict(self, number: int, factory: Record, pairs: list[Record]) -> Any:
        self._read[number] = mapping = defaultdict[Any, Any](self.read(factory))
        self._fill(mapping, pairs)
        return mapping

    def _literal(self, _: int, name: str, value: Any) -> Any:
        makers: dict[str, Callable[[], Any]] = {
            "complex": lambda: complex(*value),
            "slice": lambda: slice(*value),
            "range": lambda: range(*value),
            "device": lambda: torch.device(value),
            "dtype": lambda: dtype_of(value),
        }
        return makers[name]()

    def _enum(self, _: int, cls: str, value: Any) -> Any:
        kind = self._class(cls, enum.Enum)
        return kind[value[0]] if isinstance(value, tuple) else kind(value)

    def _bytearray(self, _: int, content: bytes) -> bytearray:
        return bytearray(content)

    def _namedtuple(self, _: int, cls: str, items: list[Record]) -> Any:
        return tuple.__new__(self._class(cls, tuple), [self.read(each) for each in items])

    def _weakref(self, _: int, target: Record) -> Any:
        value = self.read(target)
        self._alive.append(value)  # until somebody else holds it
        return weakref.ref(value)

    def _dtype(self, _: int, described: Any) -> Any:
        return np.lib.format.descr_to_dtype(described)

    def _scalar(self, _: int, described: Any, content: bytes) -> Any:
        return np.frombuffer(content, np.lib.format.descr_to_dtype(described))[0]

    def _array(self, _: int, place: Any, described: Any, shape: Any, strides: Any) -> Any:
        dtype = np.lib.format.descr_to_dtype(described)
        return self._memory.array(place, dtype, shape, strides)

    def _tensor(
        self, _: int, place: Any, form: Any, is_parameter: bool, needs_gradient: bool, own: Any
    ) -> Any:
        dtype, size, stride, device = form
        value = self._memory.tensor(place, dtype, size, stride, device)
        if is_parameter:
            value = nn.Parameter(value)
        vars(value).update({name: self.read(each) for name, each in own})
        return value.requires_grad_(needs_gradient)

    def _random(self, _: int, state: Any) -> random.Random:
        generator = random.Random()
        generator.setstate(state)
        return generator

    def _torch(self, _: int, device: str, state: Record) -> torch.Generator:
        generator = torch.Generator(device)
        generator.set_state(self.read(state))
        return generator

    def _numpy(self, _: int, bits: Record) -> np.random.Generator:
        return np.random.Generator(self.read(bits))

    def _old(self, _: int, kind: str, state: Record) -> np.random.RandomState:
        generator, content = np.random.RandomState(_bits(kind)()), self.read(state)
        self._fills.append(lambda: generator.set_state(content))
        return generator

    def _bits(self, _: int, kind: str, seeds: Any, state: Record) -> Any:
        entropy, *others = seeds
        own = dict(zip(("spawn_key", "pool_size", "n_children_spawned"), others, strict=True))
        bits = _bits(kind)(np.random.SeedSequence(self.read(entropy), **own))
        content = self.read(state)
        self._fills.append(lambda: setattr(bits, "state", content))
        return bits

    def _TensorDict(  # noqa: N802  # the name of its class
        self,
        _: int,
        pairs: list[Record],
        size: Any,
        device: str | None,
        is_locked: bool,
        names: Any,
    ) -> TensorDict:
        items = {self.read(key): self.read(value) for key, value in pairs}
        value = TensorDict(items, size, device=device, names=names)
        return value.lock_() if is_locked else value

    def _NonTensorData(self, _: int, data: Record, size: Any) -> Any:  # noqa: N802
        return NonTensorData(self.read(data), batch_size=size)

    def _partial(self, _: int, parts: list[Record]) -> Any:
        function, args, keywords, own = (self.read(each) for each in parts)
        value = functools.partial(function, *args)
        self._fills.append(lambda: value.keywords.update(keywords))
        self._fills.append(lambda: vars(value).update(own))
        return value

    def _method(self, _: int, function: Record, owner: Record) -> Any:
        return types.MethodType(self.read(function), self.read(owner))

    def _lookup(self, _: int, owner: Record, name: str) -> Any:
        found = self.read(owner)
        if not is_harmless(found, name):
            raise ValueError(f"{class_name(type(found))}.{name} may not be looked up")
        return getattr(found, name)

    def _function(self, number: int, path: str, cells: list[Any], others: list[Record]) -> Any:
        self._read[number] = function = self._at(path)
        contents = [[self.read(each) for each in cell] for cell in cells]
        state = contents, *(self.read(each) for each in others)
        self._fills.append(lambda: restore(function, state))  # what is its own is in a dict
        return function

    def _left(self, _: int, path: str) -> Any:
        return self._at(path)

    def _named(self, _: int, name: str) -> Any:
        return self._named_as(name)

    def _object(self, number: int, path: str, cls: str, own: Any, items: Any) -> Any:
        value: Any = self._new.objects.get(path)
        if class_name(type(value)) != cls:  # it had none there, or another
            kind = self._class(cls, object)
            if hasattr(kind, "__del__"):
                found = "nothing" if value is None else f"a {class_name(type(value))}"
                raise ValueError(f"it has {found} at env{path}, and it was a {cls}")
            value = made_anew(kind)
        self._read[number] = value
        if own[:1] == ("get_state()",):
            state = self.read(own[1])
            self._fills.append(lambda: value.set_state(state))
            return value
        read = {name: self.read(each) for name, each in own}
        self._changes.append(lambda: set_attributes(value, read))
        if isinstance(value, dict):
            self._changes.append(lambda: dict.clear(value))
            self._fill(value, items)
        elif isinstance(value, list):
            content = [self.read(each) for each in items]
            self._changes.append(lambda: list.__setitem__(value, slice(None), content))
        return value

    def _at(self, path: str) -> Any:
        if path not in self._new.objects:
            raise ValueError(f"it has nothing at env{path}")
        return self._new.objects[path]

    def _class(self, name: str, base: type) -> Any:
        """A class, of which objects may be made."""
        found = self._named_as(name)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ValueError(f"{name} is no class of {base.__qualname__}s")
        return found

    def _named_as(self, name: str) -> Any:
        if name not in self._new.named:
            raise ValueError(f"it holds no {name}")
        return self._new.named[name]


_KINDS = frozenset(
    (
        *("literal", "enum", "dtype", "scalar", "array", "tensor", "random", "torch", "numpy"),
        *("TensorDict", "NonTensorData", "partial", "method", "lookup", "function", "left"),
        *("named", "object", "defaultdict", "old", "bits", "bytearray", "namedtuple", "weakref"),
    )
)


def _bits(kind: str) -> Any:
    if kind not in _BITS:
        raise ValueError(f"numpy has no generator {kind}")
    return getattr(np.random, kind)
