"""The pickles that states of environments are: how they are written and read.

`StateSaver` refuses what pickling might lose, and `StateReader` what a reader would have to believe
(`torchrl_hts.env_state.names`).
"""

from __future__ import annotations

import copyreg
import enum
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import IO, Any, ClassVar

import numpy as np

from torchrl_hts.env_state.attributes import is_a
from torchrl_hts.env_state.names import (
    HOOKS,
    WHOLE_MODULES,
    Names,
    axes_in_memory,
    bind,
    definer,
    is_whole,
    method,
    view,
)
from torchrl_hts.env_state.simulations import holds_memory_of, is_simulation

__all__ = ["NameFinder", "StateReader", "StateSaver"]

_PROTOCOL = 4  # 5 restores arrays over memory that belongs to another object
# Own the memory of arrays: of constants, and of what functions of C++ (nanobind, pybind11) return.
_ARRAY_KEEPERS = ("bytes", "nb_ndarray", "PyCapsule")
_MOST_LOOKED_AT = 50_000
_WRITEABLE = 0x400  # NPY_ARRAY_WRITEABLE; flags.writeable warns of what broadcast_arrays returns
_WEAK_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_CYTHON_FUNCTION = "cython_function_or_method"


class StateSaver(pickle.Pickler):
    """A pickler that refuses what pickling might lose. One object of many dumps, one memo.

    Args:
        stream: to write to.
        fixtures: what is referred to by keys.
        names: what may be named; None for anything.

    Attributes:
        private: what must not be met, by id: its name in the base environment.
    """

    def __init__(self, stream: IO[bytes], fixtures: Mapping[Any, Any], names: Names | None) -> None:
        super().__init__(stream, _PROTOCOL)
        self.names = names
        self.fixtures = {id(value): where for where, value in fixtures.items()}
        self.private: dict[int, str] = {}
        self._simulations = [value for value in fixtures.values() if is_simulation(value)]

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        if type(obj) in _WEAK_PROXIES:
            raise _passes_for_another(type(obj))
        if id(obj) in self.private:
            raise _RefusedError(
                f"it shares {self.private[id(obj)]!r} with the base environment, which is saved "
                "by its get_state()"
            )
        if is_a(obj, types.ModuleType):
            self._check_name(obj, "the module", obj.__name__)
            return ("module", obj.__name__)
        if isinstance(obj, set) or (isinstance(obj, frozenset) and len(obj) > 1):
            raise _RefusedError(
                "it is or holds a set, and the order in which that iterates can't be restored: "
                "use a dict with values of None, or a sorted list"
            )
        return self.fixtures.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if _is_named(obj):
            self._check_name(obj, str(obj.__module__), getattr(obj, "__qualname__", obj.__name__))
            return NotImplemented  # by name
        if obj.__class__ is not cls:
            raise _passes_for_another(cls)
        if isinstance(obj, types.MethodType | types.BuiltinMethodType):
            return self._reduce_method(obj)
        if isinstance(obj, np.dtype) and obj.char == "T":  # of an array too, which comes first
            raise _RefusedError("it is or holds a StringDType: keep a list of str in its place")
        if isinstance(obj, np.ndarray):
            foreign = _owner(obj).base is not None
            if foreign and any(holds_memory_of(data, obj) for data in self._simulations):
                raise _RefusedError("it is or holds a view of MuJoCo's memory: keep a copy of it")
            return _reduce_array(obj)
        if isinstance(obj, enum.Enum):  # by some versions of Python, as a call of getattr
            return cls, (obj._value_,)
        if isinstance(obj, np.void) and obj.base is not None:
            raise _RefusedError("it is or holds a record that shares the memory of an array")
        if cls in copyreg.dispatch_table and cls.__module__ not in (*WHOLE_MODULES, "builtins"):
            raise _RefusedError(f"a function of copyreg pickles {cls.__qualname__}")
        for hook in HOOKS:
            from_ = definer(cls, hook)
            slots_only = getattr(vars(from_).get(hook), "__module__", None) == "dataclasses"
            if not is_whole(cls, from_, hook) or (slots_only and hasattr(obj, "__dict__")):
                raise _RefusedError(
                    f"{from_.__module__}.{from_.__qualname__}.{hook} says how it is pickled, "
                    "and that may lose a part of its state"
                )
        if isinstance(getattr(cls, "__del__", None), types.FunctionType):
            raise _RefusedError(f"{cls.__qualname__}.__del__ may undo what it shares with a copy")
        return NotImplemented

    def _check_name(self, value: object, module: str, name: str) -> None:
        if self.names is not None and not self.names.admits(value):
            raise self.names.refusal(module, name)

    def _reduce_method(self, value: Any) -> Any:
        """By its name, if its owner knows it by that."""
        owner, function = value.__self__, getattr(value, "__func__", None)
        if function is not None and getattr(type(owner), value.__name__, None) is not function:
            return bind, (function, owner)
        if self.names is not None:
            self.names.method(owner, value.__name__)
        return method, (owner, value.__name__)


class NameFinder(StateSaver):
    """Finds what is named, and writes what no reader needs.

    Of each dump the first objects are looked at, so many that a large table costs little.

    Attributes:
        named: functions, classes and modules.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.named: list[object] = []
        self._left = 0

    def dump(self, obj: object) -> None:
        """Look at an object, and at what it holds."""
        self._left = _MOST_LOOKED_AT
        super().dump(obj)

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        self._left -= 1
        return super().persistent_id(obj) if self._left >= 0 else ()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
            return np.empty, (0,)  # it may be large, and names nothing
        return super().reducer_override(obj)

    def _check_name(self, value: object, module: str, name: str) -> None:
        self.named.append(value)

    def _reduce_method(self, value: Any) -> Any:
        self.named.append(getattr(type(value.__self__), value.__name__, value))
        return super()._reduce_method(value)


def _is_named(value: Any) -> bool:
    """Whether pickle writes nothing but a name."""
    if is_a(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
    named = is_a(value, (type, types.FunctionType, np.ufunc, type(np.mean)))
    return named or type(value).__name__ == _CYTHON_FUNCTION


class _RefusedError(Exception):
    """An object would not be whole; says why."""


def _passes_for_another(cls: type) -> _RefusedError:
    return _RefusedError(
        f"it is or holds a {cls.__qualname__}, which passes for what it stands for, and would come "
        "back as a copy of that: hold the object itself, or look it up"
    )


def _owner(array: Any) -> Any:
    """The array that an array is a view of, or itself."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_writeable(array: np.ndarray[Any, Any]) -> bool:
    return bool(array.flags.num & _WRITEABLE)


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    """Pickle alone would make copies of views, and put the axes of others into C order.

    It would also let numbers be written to, in this machine's order of bytes. Raw bytes keep all.
    """
    owner = _owner(array)
    if type(array) is not np.ndarray or type(owner) is not np.ndarray:
        raise _RefusedError("it is or holds an array of a class derived from numpy.ndarray")
    base: Any = owner.base
    memory: Any = base.obj if isinstance(base, memoryview) else base
    if isinstance(memory, bytearray):  # arrays that were themselves unpickled
        owner = np.frombuffer(memory, np.uint8)
    elif memory is not None and type(memory).__name__ not in _ARRAY_KEEPERS:
        raise _RefusedError(
            f"it is or holds an array whose memory belongs to a {type(memory).__qualname__}"
        )
    writeable = _is_writeable(array)
    if array is owner:
        if array.size and not array.dtype.hasobject and not (writeable and array.dtype.isnative):
            raw = bytearray(array.transpose(axes_in_memory(array)).tobytes())  # gaps included
            return view, (raw, 0, array.dtype, array.shape, array.strides, writeable)
        if array.flags.c_contiguous or array.flags.f_contiguous:
            return NotImplemented
        order = axes_in_memory(array)
        return np.transpose, (array.transpose(order).copy(), tuple(np.argsort(order).tolist()))
    if array.size == 0:
        return np.empty, (array.shape, array.dtype)
    offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    buffer = memory if isinstance(memory, bytearray) else owner
    if writeable and not _is_writeable(owner):
        raise _RefusedError(
            "it is or holds an array that can be written to, over another one that can't: keep a "
            "copy of it"
        )
    return view, (buffer, offset, array.dtype, array.shape, array.strides, writeable)


# In pure Python, where each kind of call is a method of its own.
_Unpickler: Any = pickle._Unpickler
_NOT_WRITTEN = b"".join((pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4))


class StateReader(_Unpickler):  # type: ignore[misc]
    """An unpickler that goes by `Names`.

    Args:
        stream: to read from.
        names: what may be named.
        fixtures: what a state refers to by keys.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**_Unpickler.dispatch}

    def __init__(self, stream: IO[bytes], names: Names, fixtures: dict[Any, Any]) -> None:
        super().__init__(stream)
        self.names = names
        self.fixtures = fixtures

    def find_class(self, module: str, name: str) -> Any:
        """What a state names."""
        if self.names.may_import(module):
            value = super().find_class(module, name)
            if value is method or self.names.admits(value):
                return value
        raise self.names.refusal(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """What a state refers to by a key."""
        if pid[0] != "module":
            return self.fixtures[pid]
        module = sys.modules.get(pid[1])
        if module is None or not self.names.admits(module):
            raise self.names.refusal("the module", pid[1])
        return module

    def load_reduce(self) -> None:
        """Call something."""
        arguments = self.stack.pop()
        function = self.stack[-1]
        if function is method:
            self.stack[-1] = self.names.method(*arguments)
        elif self.names.calls(function):
            self.stack[-1] = function(*arguments)
        else:
            raise self._refused(function)

    def load_newobj(self) -> None:
        """Make an object without calling its constructor."""
        arguments = self.stack.pop()
        self._make(self.stack.pop(), arguments, {})

    def load_newobj_ex(self) -> None:
        """The same, with keyword arguments."""
        options = self.stack.pop()
        arguments = self.stack.pop()
        self._make(self.stack.pop(), arguments, options)

    def _make(self, cls: Any, arguments: Any, options: Any) -> None:
        if not (isinstance(cls, type) and self.names.makes(cls)):
            raise self._refused(cls)
        self.append(cls.__new__(cls, *arguments, **options))

    def load_build(self) -> None:
        """Fill an object."""
        target = self.stack[-2]
        given = any(target is fixture for fixture in self.fixtures.values())
        if given or not self.names.makes(type(target)):
            raise self._refused(type(target))
        super().load_build()

    def _refused(self, value: Any) -> pickle.UnpicklingError:
        kind = value if hasattr(value, "__qualname__") else type(value)
        return self.names.refusal(str(kind.__module__), kind.__qualname__)

    def _refuse_code(self) -> None:
        raise pickle.UnpicklingError("it names a class in a way that states don't")

    dispatch |= dict.fromkeys(_NOT_WRITTEN, _refuse_code)
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build
