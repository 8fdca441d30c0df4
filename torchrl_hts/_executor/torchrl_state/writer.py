"""Writes what an environment holds as plain data: atoms, and tuples that say what they stand for.

Objects are numbered in the order in which they are met, and written once. So what is shared stays
shared. Attributes are met in the order of their names, since that in which they were set may differ
from one environment to the next.
"""

from __future__ import annotations

import enum
import functools
import random
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor, nn

from torchrl_hts._executor.torchrl_state.memory import MemoryWriter
from torchrl_hts._executor.torchrl_state.objects import (
    ATOMS,
    GENERATORS,
    attributes,
    class_name,
    described,
    has_state_methods,
    in_set,
    is_harmless,
    is_left,
    items_of,
    literal,
    of_the_process,
    unfit,
)
from torchrl_hts.env_state.functions import code_digest, function_state, importable
from torchrl_hts.env_state.names import LIBRARIES
from torchrl_hts.errors import CannotSaveError

__all__ = ["Makeup", "StateWriter"]

Record = Any  # an atom, or a tuple whose first item says what it is of
_SEQUENCES = (list, tuple, deque, torch.Size)
MOST_OBJECTS = 50_000  # to look at one takes some 10 us


@dataclass
class Makeup:
    """What an environment is made of, which another one needs to take its state.

    Attributes:
        found: what there is at each path that another one must have there too.
        named: what it may refer to, by name: functions, classes and what these have as globals.
    """

    found: dict[str, str] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)


class StateWriter:
    """Walks through what environments hold.

    Args:
        new: the makeup of the environment when it was new; None to find that out, which refuses
            nothing.

    Attributes:
        makeup: what has been met.
        objects: what is at the paths of `makeup`.
        named: what the names in `makeup` stand for.
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
        self._unfinished: set[int] = set()  # can't be read before what they hold
        self._classes: set[type] = set()
        self._globals: dict[int, str] = {}
        self._sets: list[tuple[str, Any]] = []
        self._path = ""  # where it is
        self._take(GENERATORS)

    def write_all(self, *roots: tuple[Any, str]) -> list[Record]:
        """What values are, each at a path, and all that they hold.

        Raises:
            CannotSaveError: if a part of it can't be saved.
        """
        try:
            records = [self._write(value, path) for value, path in roots]
        except RecursionError as error:
            raise CannotSaveError(f"objects are nested too deeply at env{self._path}") from error
        self._look_at_sets()
        return records

    def _write(self, value: Any, path: str) -> Record:
        if type(value) in ATOMS:
            return value
        if (number := self._numbers.get(id(value))) is not None:
            if number in self._unfinished:
                return self._refuse(path, value, "something that is in it holds it too")
            return "=", number
        number = self._numbers[id(value)] = len(self._alive)
        if number > MOST_OBJECTS:
            raise CannotSaveError(
                f"it holds more than {MOST_OBJECTS:,} objects, env{path} among them"
            )
        self._alive.append(value)
        self._path = path
        self._unfinished.add(number)
        record = self._record(value, path, number)
        self._unfinished.discard(number)
        return record

    def _record(self, value: Any, path: str, number: int) -> Record:
        if (name := self._globals.get(id(value))) is not None:
            return self._name(value, name, path)
        if (record := self._value(value, path)) is not None:
            return record
        if (record := self._container(value, path, number)) is not None:
            return record
        if (record := self._callable(value, path, number)) is not None:
            return record
        return self._object(value, path, number)

    def _look_at_sets(self) -> None:
        """Sets stay those of the new environment, and so must hold the same."""
        paths = {id(value): path for path, value in self.objects.items()}
        for path, value in self._sets:
            content = [in_set(each, paths) for each in value]
            if None in content:
                self._refuse(path, value, "objects are in it that are nowhere else: use a list")
            members = ", ".join(sorted(map(str, content)))
            self._note(path, f"{type(value).__name__} of {members}", value)

    def shares(self, other: StateWriter) -> object | None:
        """Something that changes and that another one has met too; None if there is nothing."""
        mine = (list, dict, bytearray, np.ndarray, Tensor, np.random.Generator)
        objects = {id(value) for value in other.objects.values()}
        return next(
            (
                value
                for value in self._alive
                if id(value) in other._numbers
                and (isinstance(value, mine) or id(value) in objects)
                and not isinstance(value, gym.Env)
            ),
            None,
        )

    def gymnasium(self) -> dict[str, gym.Env[Any, Any]]:
        """The gymnasium environments that were met, which have states of their own."""
        return {path: one for path, one in self.objects.items() if isinstance(one, gym.Env)}

    def _value(self, value: Any, path: str) -> Record | None:
        """What holds no other object."""
        if type(value) is bytearray:
            return "bytearray", bytes(value)
        if type(value) in (complex, torch.dtype, torch.device, slice, range):
            return "literal", type(value).__name__, literal(value)
        if isinstance(value, enum.Enum):
            cls = self._known_class(value, path)
            return "enum", cls, value.value if type(value.value) in ATOMS else (value.name,)
        if isinstance(value, np.dtype | np.generic):
            return self._number(value, path)
        if type(value) is np.ndarray:
            if value.dtype.hasobject:
                return self._refuse(path, value, "it is an array of objects: use a list")
            place = self._new and self.memory.array(value)
            return "array", place, described(value.dtype), value.shape, value.strides
        if type(value) in (Tensor, nn.Parameter):
            return self._tensor(value, path)
        return self._generator(value, path)

    def _number(self, value: Any, path: str) -> Record:
        dtype = value if isinstance(value, np.dtype) else value.dtype
        if dtype.hasobject:
            return self._refuse(path, value, "it holds Python objects: use a list")
        if isinstance(value, np.dtype):
            return "dtype", described(value)
        return "scalar", described(dtype), value.tobytes()

    def _tensor(self, value: Tensor, path: str) -> Record:
        plain = value.layout == torch.strided and not (value.is_quantized or value.is_nested)
        if not plain or value.is_conj() or value.is_neg() or value.is_meta:
            return self._refuse(path, value, "it is no plain strided tensor")
        if value.grad_fn is not None or value.grad is not None:
            return self._refuse(path, value, "it has a gradient: keep it detached")
        place = self._new and self.memory.tensor(value.detach())
        dtype, device = str(value.dtype).removeprefix("torch."), str(value.device)
        form = dtype, tuple(value.shape), value.stride(), device
        own = self._pairs(vars(value).items(), path)
        return "tensor", place, form, type(value) is nn.Parameter, value.requires_grad, own

    def _generator(self, value: Any, path: str) -> Record | None:
        if type(value) is random.Random:
            return "random", value.getstate()
        if type(value) is torch.Generator:
            return "torch", str(value.device), self._write(value.get_state(), path)
        if type(value) is np.random.Generator:
            return "numpy", self._write(value.bit_generator, f"{path}.bit_generator")
        if type(value) is np.random.RandomState:
            bits = type(value._bit_generator).__name__
            return "old", bits, self._write(value.get_state(legacy=False), f"{path}.state")
        if not isinstance(value, np.random.BitGenerator):
            return None
        kind, seeds = type(value).__name__, value.seed_seq
        if getattr(np.random, kind, None) is not type(value):
            return self._refuse(path, value, f"{kind} is no generator of numpy's own")
        if type(seeds) is not np.random.SeedSequence:
            return self._refuse(path, value, "it has no SeedSequence of numpy's own")
        entropy = self._write(seeds.entropy, f"{path}.entropy")
        own = entropy, seeds.spawn_key, seeds.pool_size, seeds.n_children_spawned
        return "bits", kind, own, self._write(value.state, f"{path}.state")

    def _container(self, value: Any, path: str, number: int) -> Record | None:
        if isinstance(value, tuple) and hasattr(type(value), "_fields"):
            return "namedtuple", self._known_class(value, path), self._items(value, path)
        if type(value) in (list, deque, dict, OrderedDict, defaultdict):
            self._unfinished.discard(number)
        if type(value) in _SEQUENCES:
            return type(value).__name__, self._items(value, path), getattr(value, "maxlen", None)
        if type(value) in (dict, OrderedDict):
            return type(value).__name__, self._pairs(value.items(), path)
        if type(value) is defaultdict:
            factory = self._write(value.default_factory, f"{path}.default_factory")
            return "defaultdict", factory, self._pairs(value.items(), path)
        if isinstance(value, set | frozenset):
            self._sets.append((path, value))
            return "left", path
        if type(value) is TensorDict:
            pairs = self._pairs(value.items(), path)
            form = tuple(value.batch_size), value.device and str(value.device), value.is_locked
            return "TensorDict", pairs, *form, value.names if any(value.names) else None
        if type(value) is NonTensorData:
            data = self._write(value.data, f"{path}.data")
            return "NonTensorData", data, tuple(value.batch_size)
        return None

    def _items(self, items: Any, path: str) -> list[Record]:
        return [
            each if type(each) in ATOMS else self._write(each, f"{path}[{at}]")
            for at, each in enumerate(items)
        ]

    def _pairs(self, items: Any, path: str) -> list[Record]:
        pairs = []
        for at, (key, each) in enumerate(items):
            first = key if type(key) in ATOMS else self._write(key, f"{path}[key {at}]")
            if type(each) not in ATOMS:
                name = repr(key) if type(key) in ATOMS else f"item {at}"
                each = self._write(each, f"{path}[{name}]")
            pairs.append((first, each))
        return pairs

    def _callable(self, value: Any, path: str, number: int) -> Record | None:
        if type(value) is functools.partial:
            parts = value.func, value.args, value.keywords, vars(value)
            return "partial", [self._write(each, f"{path}({at})") for at, each in enumerate(parts)]
        if type(value) is weakref.ref:
            if getattr(value, "__callback__", None) is not None:
                return self._refuse(path, value, "it calls something back")
            return "weakref", self._write(value(), f"{path}()")
        owner, inner = getattr(value, "__self__", None), getattr(value, "__func__", None)
        if not isinstance(inner, types.FunctionType) and is_harmless(
            owner, getattr(value, "__name__", "_")
        ):
            return "lookup", self._write(owner, f"{path}.__self__"), value.__name__
        if isinstance(value, types.MethodType):
            function = self._write(value.__func__, f"{path}.__func__")
            return "method", function, self._write(value.__self__, f"{path}.__self__")
        if isinstance(value, types.FunctionType) and not importable(value):
            return self._function(value, path, number)
        if isinstance(value, types.BuiltinFunctionType) and not (
            owner is None or isinstance(owner, types.ModuleType)
        ):
            return self._refuse(path, value, f"it is a method of a {class_name(type(owner))}")
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | np.ufunc):
            module = getattr(value, "__module__", None) or "builtins"
            return self._name(value, f"{module}.{value.__qualname__}", path)
        return None

    def _function(self, value: types.FunctionType, path: str, number: int) -> Record:
        """A function within another, which holds variables of that."""
        self._unfinished.discard(number)
        what = f"the function {value.__qualname__} of code {code_digest(value)}"
        self._note(path, what, value)
        contents, *others = function_state(value)
        names = value.__code__.co_freevars
        cells = [
            self._items(held, f"{path}.{name}") for name, held in zip(names, contents, strict=True)
        ]
        return "function", path, cells, self._items(others, path)

    def _object(self, value: Any, path: str, number: int) -> Record:
        """An object with attributes."""
        cls = class_name(type(value))
        if is_left(value):  # and must be the very one
            return self._left(value, f"{cls} at {id(value):#x}", path)
        if (why := unfit(value)) is not None:
            return self._refuse(path, value, why)
        self._unfinished.discard(number)
        self._class(type(value))
        self.makeup.found[path], self.objects[path] = cls, value
        in_place = self._new is None or self._new.found.get(path) == cls
        if not in_place and (
            cls not in self._new.named or hasattr(type(value), "__del__")  # type: ignore[union-attr]
        ):
            return self._refuse(path, value, "the environment had no such object when it was new")
        if has_state_methods(value):
            state = self._write(value.get_state(), f"{path}.get_state()")
            return "object", path, cls, ("get_state()", state), None
        own = [
            (name, each if type(each) in ATOMS else self._write(each, f"{path}.{name}"))
            for name, each in attributes(value).items()
        ]
        items: Any = items_of(value)
        if isinstance(value, dict):
            items = self._pairs(items, path)
        elif items is not None:
            items = self._items(items, path)
        return "object", path, cls, own, items

    def _class(self, cls: type) -> None:
        """Take note of a class, and of what is its module's and its own, and so no state."""
        if cls in self._classes:
            return
        self._classes.add(cls)
        own = cls.__module__.partition(".")[0] not in LIBRARIES
        self._take({class_name(cls): cls, **(of_the_process(cls) if own else {})})

    def _take(self, known: Mapping[str, Any]) -> None:
        """Take note of what may be named."""
        self.named |= known
        self.makeup.named |= known.keys()
        self._globals |= {id(one): name for name, one in known.items() if not isinstance(one, type)}

    def _known_class(self, value: Any, path: str) -> str:
        """The name of a value's class, of which new ones are made."""
        cls = class_name(type(value))
        self._class(type(value))
        if self._new is not None and cls not in self._new.named:
            self._refuse(path, value, "the environment knew no such class when new")
        return cls

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
