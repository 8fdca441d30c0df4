"""What the state of an environment may name: reading one runs no code that comes with it.

A state is a pickle, which says by name what is to be called and made. Its reader
(`pickles.py`) goes by these rules instead of believing it:

- called are a few functions and types that only make values: those of `_FUNCTIONS` and `_TYPES`;
- objects of other classes are made without their constructor and filled with attributes. Their
  classes are of a package that a layer of the environment is of, or that an object which it has
  when it is new is of. It is not Python's own library, numpy or torch. Classes that take part in
  their own pickling, or do something at their end, are left out;
- a function, a method or a module can't be named, unless the new environment has it too.

`Names` knows them for one environment, in the process that saves as well as in the one that
restores, so that whatever is refused is refused when it is saved.
"""

from __future__ import annotations

import collections
import copyreg
import datetime
import decimal
import fractions
import pathlib
import pickle
import random
import re
import sys
import types
import uuid
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

__all__ = [
    "HOOKS",
    "LIBRARIES",
    "WHOLE_MODULES",
    "Names",
    "axes_in_memory",
    "bind",
    "definer",
    "is_whole",
    "method",
    "view",
]

HOOKS = (
    "__reduce_ex__",
    "__reduce__",
    "__getstate__",
    "__setstate__",
    "__getnewargs_ex__",
    "__getnewargs__",
)
# Their own pickling is whole, also for classes derived from them.
_WHOLE: tuple[type, ...] = (
    *(object, int, float, complex, str, bytes, bytearray, tuple, list, dict),
    *(collections.deque, collections.OrderedDict, partial),
)
# Whole as they are; what a class derived from them adds would be lost.
_WHOLE_ITSELF: tuple[type, ...] = (
    frozenset,
    collections.defaultdict,
    range,
    slice,
    type(...),
    types.BuiltinMethodType,
)
WHOLE_MODULES = frozenset(
    ("collections", "datetime", "decimal", "fractions", "numpy", "pathlib", "random", "re", "uuid")
)

LIBRARIES = frozenset(
    {*sys.stdlib_module_names, "numpy", "torch", "tensordict", "torchrl", "cloudpickle"}
)
# Their methods draw numbers or change a container, whatever they are given.
_HARMLESS_OWNERS: tuple[type, ...] = (
    *(random.Random, *random.Random.__bases__, np.random.Generator, np.random.RandomState),
    *(list, dict, collections.deque),
)
# May be called with anything: they make a value.
_TYPES: frozenset[type] = frozenset(
    (
        *(object, bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set),
        *(frozenset, range, slice, partial, random.Random, uuid.UUID, np.ndarray),
        *(np.random.Generator, np.random.RandomState, np.random.SeedSequence),
        *(
            value
            for module in (collections, datetime, decimal, fractions, pathlib)
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__.strip("_").startswith(module.__name__)
        ),
    )
)
# Classes that are derived from these are called too when they are unpickled.
_CALLED: tuple[type, ...] = (
    *(collections.OrderedDict, collections.deque, collections.Counter, partial, random.Random),
    *(fractions.Fraction, decimal.Decimal, datetime.date, datetime.timedelta, pathlib.PurePath),
)
_FAMILIES: tuple[type, ...] = (np.generic, np.dtype, np.random.BitGenerator)


def method(owner: object, name: str) -> Any:
    """A bound method. Only ever named in states: `StateReader` looks it up by its own rules."""
    return getattr(owner, name)


def bind(function: types.FunctionType, owner: object) -> types.MethodType:
    """A method that its owner doesn't know by its name."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"a {type(function).__qualname__} is no method")
    return types.MethodType(function, owner)


def view(
    buffer: Any, offset: int, dtype: Any, shape: Any, strides: Any, writeable: bool = True
) -> Any:
    """An array over the memory of another one, or of a bytearray."""
    if isinstance(buffer, np.ndarray):
        buffer = buffer.transpose(axes_in_memory(buffer))
    if np.dtype(dtype).hasobject and not (
        isinstance(buffer, np.ndarray)
        and dtype == buffer.dtype == object
        and not any(number % dtype.itemsize for number in (offset, *strides))
    ):
        raise TypeError("what isn't a reference can't be read as one")
    array: Any = np.ndarray(shape, dtype, buffer, offset, strides)
    array.flags.writeable = array.flags.writeable and writeable
    return array


def axes_in_memory(array: np.ndarray[Any, Any]) -> list[int]:
    """The axes of an array, the one with the longest stride first."""
    return sorted(range(array.ndim), key=lambda axis: -array.strides[axis])


def _reconstructors() -> Iterable[Any]:
    """What numpy's own values are made with, whatever its version calls it."""
    generator = np.random.default_rng(0)
    bits, seed = generator.bit_generator, np.random.SeedSequence(0)
    values: tuple[Any, ...] = (
        *(np.zeros(1), np.float64(0), generator, np.random.RandomState(0), bits, seed),
    )
    for value in values:
        function, arguments = value.__reduce__()[:2]
        yield function
        yield from (argument for argument in arguments if callable(argument))


# May be called with anything, likewise.
_FUNCTIONS: tuple[Any, ...] = (
    *_reconstructors(),
    *(copyreg.dispatch_table[re.Pattern](re.compile(""))[0], np.transpose, np.empty),
    *(bind, view, ...),
)


class Names:
    """What the states of an environment may name.

    Args:
        layers: the classes of its layers.
        held: functions, classes and modules that it has when it is new.
        makeup: what another one must have in common with it to take its state; None: not known.

    Attributes:
        makeup: as given.
    """

    def __init__(
        self,
        layers: Iterable[type],
        held: Iterable[object] = (),
        makeup: list[str] | None = None,
    ) -> None:
        self.makeup = makeup
        self._held = {id(value): value for value in held}
        classes = [value for value in self._held.values() if isinstance(value, type)]
        mros = (cls.__mro__ for cls in (*layers, *classes))
        self._packages = {_package(cls.__module__) for mro in mros for cls in mro} - LIBRARIES

    def may_import(self, module: str) -> bool:
        """Whether a module may be looked into."""
        return module in sys.modules or _package(module) in self._packages

    def admits(self, value: Any) -> bool:
        """Whether a function, a class, a module or another thing with a name may be named."""
        known = value is method or any(value is function for function in _FUNCTIONS)
        if known or id(value) in self._held:
            return True
        if isinstance(value, type):
            ours = _package(value.__module__) in self._packages
            return ours or value in _TYPES or issubclass(value, _FAMILIES)
        return False

    def makes(self, cls: type) -> bool:
        """Whether objects of a class may be made and filled."""
        if cls in _TYPES or issubclass(cls, _FAMILIES):
            return True
        if not self.admits(cls) or issubclass(cls, type) or hasattr(cls, "__del__"):
            return False
        return all(is_whole(cls, definer(cls, hook), hook) for hook in HOOKS)

    def calls(self, function: Any) -> bool:
        """Whether something may be called."""
        if not isinstance(function, type):
            return any(function is known for known in _FUNCTIONS)
        if function in _TYPES or issubclass(function, _FAMILIES):
            return True
        derived = issubclass(function, _CALLED) or hasattr(function, "__members__")
        return derived and self.makes(function)

    def method(self, owner: Any, name: str) -> Any:
        """A bound method of an object; raises if that may not be had."""
        function = getattr(type(owner), name, None)
        harmless = definer(type(owner), name) in _HARMLESS_OWNERS and not name.startswith("_")
        if function is None or not (harmless or id(function) in self._held):
            raise self.refusal(type(owner).__module__, f"{type(owner).__qualname__}.{name}")
        return getattr(owner, name)

    @staticmethod
    def refusal(module: str, name: str) -> pickle.UnpicklingError:
        """The error for what may not be named."""
        return pickle.UnpicklingError(
            f"it names {module}.{name}, which is neither plain data, nor a class of the "
            "environment's own packages that pickle saves whole, nor anything that the environment "
            "has when it is new"
        )


def _package(module: str) -> str:
    return module.partition(".")[0]


def definer(cls: type, hook: str) -> type:
    """The class that a class has a method from."""
    return next((c for c in cls.__mro__ if hook in vars(c)), object)


def is_whole(cls: type, definer: type, hook: str) -> bool:
    """If pickling by a hook, which a class has from ``definer``, keeps all of the state."""
    if definer in _WHOLE or definer.__module__.startswith("gymnasium.spaces"):
        return True
    if hasattr(cls, "__members__"):  # an enumeration, of Python or of C++
        return True
    if getattr(vars(definer)[hook], "__module__", None) in ("dataclasses", "collections"):
        return True
    of_a_module = {_package(c.__module__) for c in (cls, definer)} <= WHOLE_MODULES
    return of_a_module or (definer is cls and cls in _WHOLE_ITSELF)
