"""What is known of the objects that a TorchRL environment holds.

Most are filled anew in place. A few are left as they are in the new environment, since nothing that
happens changes them, or since they can't be anything else there.
"""

from __future__ import annotations

import contextlib
import copyreg
import logging
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from multiprocessing import synchronize
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, Transform

__all__ = [
    "ATOMS",
    "attributes",
    "class_name",
    "described",
    "globals_of",
    "has_state_methods",
    "in_set",
    "is_global",
    "is_harmless",
    "is_importable",
    "is_left",
    "items_of",
    "kept_attributes",
    "literal",
    "made_anew",
    "set_attributes",
    "unfit",
]

ATOMS = (type(None), bool, int, float, str, bytes)  # stand for themselves in a state

# Of every module: hooks, and how it was made.
_MODULES = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}
_HOOKS = [name for name in _MODULES if name.endswith("_hooks")]
# Specs, what is derived from them, and who holds whom.
_ENVIRONMENTS = _MODULES | {"_cache", "_output_spec", "_input_spec"}
_TRANSFORMS = _MODULES | {"_container"}

_LEFT: tuple[type, ...] = (
    *(TensorSpec, gym.Env, types.ModuleType, logging.Logger),
    # Locks are open whenever a state is saved.
    *(type(threading.Lock()), type(threading.RLock()), synchronize.Lock, synchronize.RLock),
)
# Their methods draw numbers or change a container, whatever they are given.
_HARMLESS: tuple[type, ...] = (
    *(random.Random, np.random.Generator, np.random.RandomState, torch.Generator),
    *(list, dict, deque),
)


class _Plain:
    """Nothing but attributes."""


class _Slotted:
    __slots__ = ()


def class_name(cls: type) -> str:
    """The name of a class, by which two processes know it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_left(value: object) -> bool:
    """Whether a new environment keeps its own one as it is."""
    return isinstance(value, _LEFT) or type(value) is object


def is_global(value: object) -> bool:
    """Whether it is a generator that a process has one of, which each environment enters."""
    mine: tuple[object, ...] = (
        random._inst,
        np.random.mtrand._rand,
        torch.default_generator,
    )
    return any(value is each for each in mine)


def is_importable(value: Any) -> bool:
    """Whether a function or a class is found by its name."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def is_harmless(owner: object, name: str) -> bool:
    """Whether a method of C may be looked up by its name."""
    return isinstance(owner, _HARMLESS) and not name.startswith("_")


def kept_attributes(value: object) -> frozenset[str]:
    """Attributes that a new object keeps as they are."""
    if isinstance(value, EnvBase):
        return _ENVIRONMENTS
    if isinstance(value, Transform):
        return _TRANSFORMS
    return _MODULES if isinstance(value, nn.Module) else frozenset()


def attributes(value: object) -> dict[str, Any]:
    """What is saved of an object by name, of its ``__slots__`` too, in an order of its own."""
    kept = kept_attributes(value)
    own: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for name in _slots(type(value)):
        with contextlib.suppress(AttributeError):  # nothing has been put there
            own[name] = object.__getattribute__(value, name)
    return {name: own[name] for name in sorted(own) if name not in kept}


def items_of(value: object) -> Any:
    """The items of an object that is a list or a dict besides; None if it is neither."""
    if isinstance(value, dict):
        return list(dict.items(value))
    return list(list.__iter__(value)) if isinstance(value, list) else None


def unfit(value: object) -> str | None:
    """Why the attributes of an object may not be all that there is to it; None if they are."""
    cls = type(value)
    if isinstance(value, nn.Module) and any(vars(value)[name] for name in _HOOKS):
        return "it is a module with hooks, and what these hold can't be seen"
    base = next((each for each in (dict, list) if issubclass(cls, each)), object)
    plain = _Plain if base is object else base
    expected = object.__basicsize__ if base is object else plain.__basicsize__
    expected += 8 * len(_slots(cls))
    expected += 8 * (cls.__dictoffset__ > 0) + 8 * (cls.__weakrefoffset__ > 0)
    if cls.__basicsize__ > expected or (not hasattr(value, "__dict__") and not _slots(cls)):
        return "it is of a class of C, or derived from one, and what that holds can't be seen"
    return None


def has_state_methods(value: object) -> bool:
    """Whether an environment says itself what its state is."""
    if not isinstance(value, EnvBase):
        return False
    methods = (getattr(type(value), name, None) for name in ("get_state", "set_state"))
    # TorchRL has a set_state of its own.
    return all(callable(each) and not each.__module__.startswith("torchrl.") for each in methods)


def made_anew(cls: type) -> Any:
    """A new object, without what its constructor does; but a module has hooks."""
    base: Any = next((each for each in (dict, list) if issubclass(cls, each)), object)
    value = base.__new__(cls)
    if isinstance(value, nn.Module):
        nn.Module.__init__(value)
    return value


def set_attributes(value: Any, read: dict[str, Any]) -> None:
    """Give an object these attributes, and no others but those that it keeps."""
    own, slots = getattr(value, "__dict__", {}), _slots(type(value))
    for name in attributes(value):
        if name in own:
            del own[name]
        else:
            object.__delattr__(value, name)
    for name, each in read.items():
        if name in slots:
            object.__setattr__(value, name, each)
        else:
            own[name] = each


def globals_of(cls: type) -> dict[str, Any]:
    """What the module of a class and the class itself hold, by name; in short containers too.

    It is the process's, and no state of an environment. Classes are those of the module alone.
    """
    module = sys.modules.get(cls.__module__)
    found: dict[str, Any] = {}
    for owner, prefix in ((module, cls.__module__), (cls, class_name(cls))):
        for name, value in dict(getattr(owner, "__dict__", {})).items():
            if isinstance(value, type):
                if value.__module__ == cls.__module__:
                    found[class_name(value)] = value
            elif name.startswith("__") or isinstance(value, _NO_GLOBALS):
                continue
            else:
                found[f"{prefix}.{name}"] = value
                found |= _within(value, f"{prefix}.{name}")
    return found


_MOST_WITHIN = 1000
_NO_GLOBALS = (int, float, str, bytes, type(None), types.ModuleType, types.FunctionType, property)


def _within(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict | list | tuple) or len(value) > _MOST_WITHIN:
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        f"{name}[{key!r}]": each
        for key, each in items
        if not isinstance(each, (*_NO_GLOBALS, type))
    }


def _slots(cls: type) -> list[str]:
    names: Callable[[type], list[str]] = copyreg._slotnames  # type: ignore[attr-defined]
    return names(cls)


def in_set(value: Any, paths: dict[int, str]) -> str | None:
    """What a member of a set is known by; None if it has no name."""
    if type(value) is tuple:
        parts = [in_set(each, paths) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, type):
        return class_name(value)
    return repr(value) if type(value) in ATOMS else paths.get(id(value))


def described(dtype: np.dtype[Any]) -> Any:
    """A data type of numpy, as plain data."""
    return np.lib.format.dtype_to_descr(dtype)


def literal(value: Any) -> Any:
    """What some values are made of."""
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, slice | range):
        return value.start, value.stop, value.step
    return str(value).removeprefix("torch.")
