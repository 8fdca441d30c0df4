"""Writes what an environment holds as plain data: atoms, and tuples that say what they stand for.

Objects are numbered in the order in which they are met, and written once. So what is shared stays
shared. Attributes are met in the order of their names, since that in which they were set may differ
from one environment to the next.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import random
import types
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor, nn

from torchrl_hts._executor.torchrl_state.memory import MemoryWriter
from torchrl_hts._executor.torchrl_state.objects import (
    attributes,
    class_name,
    has_state_methods,
    is_global,
    is_harmless,
    is_importable,
    is_left,
    items_of,
    unfit,
)
from torchrl_hts.errors import CannotSaveError

__all__ = ["ATOMS", "Makeup", "StateWriter"]

Record = Any  # an atom, or a tuple whose first item says what it is of
ATOMS = (type(None), bool, int, float, str, bytes)
_SEQUENCES = (list, tuple, deque, torch.Size)


@dataclass
class Makeup:
    """What an environment is made of, which another one needs to take its state.

    Attributes:
        found: what there is at each path that another one must have there too.
        classes: of its objects, by name.
        named: functions and classes that it refers to, by name.
    """

    found: dict[str, str] = field(default_factory=dict)
    classes: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)


class StateWriter:
    """Walks through what environments hold.

    Args:
        new: the makeup of the environment when it was new; None to find that out, which refuses
            nothing.

    Attributes:
        makeup: what has been met.
        objects: what is at the paths of `makeup`.
        named: what the names in `makeup` stand for, and those of classes.
        memory: what tensors and arrays are of.
    """

    def __init__(self, new: Makeup | None = None) -> None:
        self.makeup = Makeup()
        self.objects: dict[str, Any] = {}
        self.named: dict[str, Any] = {}
        self.memory = MemoryWriter()
        self._new = new
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []
        self._unfinished: set[int] = set()  # tuples, which can't be read before what they hold
        self._sets: list[tuple[str, Any]] = []

    def write(self, value: Any, path: str) -> Record:
        """What a value is, at a path.

        Raises:
            CannotSaveError: if a part of it can't be saved.
        """
        if type(value) in ATOMS:
            return value
        if (number := self._numbers.get(id(value))) is not None:
            if number in self._unfinished:
                return self._refuse(path, value, "a tuple that is in it holds it too")
            return "=", number
        number = self._numbers[id(value)] = len(self._alive)
        self._alive.append(value)
        for write in (self._value, self._container, self._callable):
            if (record := write(value, path)) is not None:
                return record
        return self._object(value, path)

    def finish(self) -> None:
        """Look at sets: they stay those of the new environment, and so must hold the same.

        Raises:
            CannotSaveError: if they hold something else than when it was new.
        """
        paths = {id(value): path for path, value in self.objects.items()}
        for path, value in self._sets:
            content = [_in_set(each, paths) for each in value]
            if None in content:
                self._refuse(path, value, "objects are in it that are nowhere else: use a list")
            members = ", ".join(sorted(map(str, content)))
            self._note(path, f"{type(value).__name__} of {members}", value)

    def gymnasium(self) -> dict[str, gym.Env[Any, Any]]:
        """The gymnasium environments that were met, which have states of their own."""
        return {path: one for path, one in self.objects.items() if isinstance(one, gym.Env)}

    def _value(self, value: Any, path: str) -> Record | None:
        """What holds no other object."""
        if is_global(value):
            return self._name(value, f"the process's own {class_name(type(value))}", path)
        if type(value) in (complex, torch.dtype, torch.device, slice, range):
            return "literal", type(value).__name__, _literal(value)
        if isinstance(value, enum.Enum):
            cls = class_name(type(value))
            self.named[cls] = type(value)
            self.makeup.classes.add(cls)
            if self._new is not None and cls not in self._new.classes:
                return self._refuse(path, value, "the environment had no such value when new")
            return "enum", cls, value.name
        if isinstance(value, np.dtype | np.generic):
            return self._number(value, path)
        if type(value) is np.ndarray:
            if value.dtype.hasobject:
                return self._refuse(path, value, "it is an array of objects: use a list")
            place = self.memory.array(value)
            return "array", place, _described(value.dtype), value.shape, value.strides
        if type(value) in (Tensor, nn.Parameter, nn.Buffer):
            return self._tensor(value, path)
        return self._generator(value, path)

    def _number(self, value: Any, path: str) -> Record:
        dtype = value if isinstance(value, np.dtype) else value.dtype
        if dtype.hasobject:
            return self._refuse(path, value, "it holds Python objects: use a list")
        if isinstance(value, np.dtype):
            return "dtype", _described(value)
        return "scalar", _described(dtype), value.tobytes()

    def _tensor(self, value: Tensor, path: str) -> Record:
        plain = value.layout == torch.strided and not (value.is_quantized or value.is_nested)
        if not plain or value.is_conj() or value.is_neg():
            return self._refuse(path, value, "it is no plain strided tensor")
        if value.grad_fn is not None or value.grad is not None:
            return self._refuse(path, value, "it has a gradient: keep it detached")
        place = self.memory.tensor(value.detach())
        dtype, device = str(value.dtype).removeprefix("torch."), str(value.device)
        form = dtype, tuple(value.shape), value.stride(), device
        return "tensor", place, form, type(value).__name__, value.requires_grad

    def _generator(self, value: Any, path: str) -> Record | None:
        if type(value) is random.Random:
            return "random", value.getstate()
        if type(value) is torch.Generator:
            return "torch", str(value.device), self.write(value.get_state(), path)
        if type(value) not in (np.random.Generator, np.random.RandomState):
            return None
        is_new = type(value) is np.random.Generator
        bits = value.bit_generator if is_new else value._bit_generator
        kind = type(bits).__name__
        if getattr(np.random, kind, None) is not type(bits):
            return self._refuse(path, value, f"{kind} is no generator of numpy's own")
        if not is_new:  # nobody asks it for seeds
            state = self.write(value.get_state(legacy=False), f"{path}.state")
            return "numpy", kind, None, state
        seeds: Any = bits.seed_seq
        if type(seeds) is not np.random.SeedSequence:
            return self._refuse(path, value, "it has no SeedSequence of numpy's own")
        entropy = self.write(seeds.entropy, f"{path}.entropy")
        own = entropy, seeds.spawn_key, seeds.pool_size, seeds.n_children_spawned
        return "numpy", kind, own, self.write(bits.state, f"{path}.state")

    def _container(self, value: Any, path: str) -> Record | None:
        if type(value) in _SEQUENCES:
            number = len(self._alive) - 1
            if type(value) is tuple:
                self._unfinished.add(number)
            items = [self.write(each, f"{path}[{at}]") for at, each in enumerate(value)]
            self._unfinished.discard(number)
            return type(value).__name__, items, getattr(value, "maxlen", None)
        if type(value) in (dict, OrderedDict):
            return type(value).__name__, self._pairs(value.items(), path)
        if type(value) is defaultdict:
            factory = self.write(value.default_factory, f"{path}.default_factory")
            return "defaultdict", factory, self._pairs(value.items(), path)
        if isinstance(value, set | frozenset):
            self._sets.append((path, value))
            return "left", path
        if type(value) is TensorDict:
            items = self._pairs(value.items(), path)
            form = tuple(value.batch_size), value.device and str(value.device), value.is_locked
            return "TensorDict", items, *form
        if type(value) is NonTensorData:
            data = self.write(value.data, f"{path}.data")
            return "NonTensorData", data, tuple(value.batch_size)
        return None

    def _pairs(self, items: Any, path: str) -> list[Record]:
        pairs = []
        for at, (key, each) in enumerate(items):
            name = repr(key) if type(key) in ATOMS else f"item {at}"
            key_record = self.write(key, f"{path}[key {at}]")
            pairs.append((key_record, self.write(each, f"{path}[{name}]")))
        return pairs

    def _callable(self, value: Any, path: str) -> Record | None:
        if type(value) is functools.partial:
            parts = value.func, value.args, value.keywords, vars(value)
            return "partial", [self.write(each, f"{path}({at})") for at, each in enumerate(parts)]
        if isinstance(value, types.MethodType):
            function = self.write(value.__func__, f"{path}.__func__")
            return "method", function, self.write(value.__self__, f"{path}.__self__")
        if isinstance(value, types.BuiltinMethodType) and is_harmless(
            value.__self__, value.__name__
        ):
            return "lookup", self.write(value.__self__, f"{path}.__self__"), value.__name__
        if isinstance(value, types.FunctionType) and not is_importable(value):
            return self._function(value, path)
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | np.ufunc):
            module = getattr(value, "__module__", None) or "builtins"
            return self._name(value, f"{module}.{value.__qualname__}", path)
        return None

    def _function(self, value: types.FunctionType, path: str) -> Record:
        """A function within another, which holds variables of that."""
        digest = hashlib.sha256(value.__code__.co_code).hexdigest()[:16]
        self._note(path, f"the function {value.__qualname__} of code {digest}", value)
        cells = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                cells.append([self.write(cell.cell_contents, f"{path}.{name}")])
            except ValueError:  # nothing has been put there
                cells.append([])
        parts = value.__defaults__, value.__kwdefaults__, vars(value)
        others = [self.write(each, f"{path}({at})") for at, each in enumerate(parts)]
        return "function", path, cells, others

    def _object(self, value: Any, path: str) -> Record:
        """An object with attributes."""
        cls = class_name(type(value))
        if is_left(value):
            return self._left(value, cls, path)
        if (why := unfit(value)) is not None:
            return self._refuse(path, value, why)
        self.named[cls] = type(value)
        self.makeup.classes.add(cls)
        self.makeup.found[path], self.objects[path] = cls, value
        in_place = self._new is None or self._new.found.get(path) == cls
        if not in_place and (
            cls not in self._new.classes or hasattr(type(value), "__del__")  # type: ignore[union-attr]
        ):
            return self._refuse(path, value, "the environment had no such object when it was new")
        own = self._attributes(value, path)
        items: Any = items_of(value)
        if isinstance(value, dict):
            items = self._pairs(items, path)
        elif items is not None:
            items = [self.write(each, f"{path}[{at}]") for at, each in enumerate(items)]
        return "object", path if in_place else None, cls, own, items

    def _attributes(self, value: Any, path: str) -> list[tuple[str, Record]] | Record:
        """What an object's attributes are, or what it says of itself where they can't be saved."""
        before, places = len(self._alive), self.memory.count
        own = attributes(value).items()
        try:
            return [(name, self.write(each, f"{path}.{name}")) for name, each in own]
        except CannotSaveError:
            if not has_state_methods(value):
                raise
        for each in self._alive[before:]:
            del self._numbers[id(each)]
        del self._alive[before:]
        self.memory.forget(places)
        return "get_state()", self.write(value.get_state(), f"{path}.get_state()")

    def _left(self, value: Any, what: str, path: str) -> Record:
        """What a new environment keeps its own one of."""
        self._note(path, what, value)
        return "left", path

    def _note(self, path: str, what: str, value: Any) -> None:
        self.makeup.found[path], self.objects[path] = what, value
        if self._new is not None and self._new.found.get(path) != what:
            self._refuse(path, value, f"the environment had no {what} there when it was new")

    def _name(self, value: Any, name: str, path: str) -> Record:
        self.makeup.named.add(name)
        self.named[name] = value
        if self._new is not None and name not in self._new.named:
            return self._refuse(path, value, f"the environment held no {name} when it was new")
        return "named", name

    def _refuse(self, path: str, value: Any, why: str) -> Record:
        """Raise, unless it is only looked at; then nobody reads the record."""
        if self._new is not None:
            raise CannotSaveError(
                f"env{path} ({class_name(type(value))}) can't be saved: {why}. Keep what changes "
                "in tensors, arrays and plain Python, in objects that the constructor has made; "
                "or define get_state() and set_state(state) in the EnvBase that is at the bottom"
            )
        return "refused"


def _in_set(value: Any, paths: dict[int, str]) -> str | None:
    """What a member of a set is known by; None if it has no name."""
    if type(value) is tuple:
        parts = [_in_set(each, paths) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, type):
        return class_name(value)
    return repr(value) if type(value) in ATOMS else paths.get(id(value))


def _described(dtype: np.dtype[Any]) -> Any:
    return np.lib.format.dtype_to_descr(dtype)


def _literal(value: Any) -> Any:
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, slice | range):
        return value.start, value.stop, value.step
    return str(value).removeprefix("torch.")
