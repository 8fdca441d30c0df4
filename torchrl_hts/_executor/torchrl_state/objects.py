"""What is known of the objects that a TorchRL environment holds.

Most are filled anew in place. A few are left as they are in the new environment, since nothing that
happens changes them, or since they can't be anything else there.
"""

from __future__ import annotations

import logging
import random
import threading
import types
from collections import deque
from multiprocessing import synchronize
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, Transform

from torchrl_hts.env_state.attributes import attributes_of, num_slots, set_attribute
from torchrl_hts.env_state.functions import globals_of

__all__ = [
    "ATOMS",
    "GENERATORS",
    "attributes",
    "class_name",
    "described",
    "has_state_methods",
    "in_set",
    "is_harmless",
    "is_left",
    "items_of",
    "literal",
    "made_anew",
    "of_the_process",
    "set_attributes",
    "unfit",
]

ATOMS = (type(None), bool, int, float, str, bytes)  # stand for themselves in a state

# Of which a process has one each, which environments enter; by their names.
GENERATORS: dict[str, object] = {
    "Python's own generator": random._inst,
    "numpy's own generator": np.random.mtrand._rand,
    "torch's own generator": torch.default_generator,
}

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


def class_name(cls: type) -> str:
    """The name of a class, by which two processes know it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_left(value: object) -> bool:
    """Whether a new environment keeps its own one as it is."""
    return isinstance(value, _LEFT) or type(value) is object


def is_harmless(owner: object, name: str) -> bool:
    """Whether a method of C may be looked up by its name."""
    return isinstance(owner, _HARMLESS) and not name.startswith("_")


def attributes(value: object) -> dict[str, Any]:
    """What is saved of an object by name, in an order of its own; the rest stays as it is."""
    kept: frozenset[str] = frozenset()
    if isinstance(value, nn.Module):
        kept = _MODULES
        kept = _ENVIRONMENTS if isinstance(value, EnvBase) else kept
        kept = _TRANSFORMS if isinstance(value, Transform) else kept
    return {name: each for name, each in sorted(attributes_of(value).items()) if name not in kept}


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
    expected = _builtin(cls).__basicsize__ + 8 * num_slots(cls)
    expected += 8 * (cls.__dictoffset__ > 0) + 8 * (cls.__weakrefoffset__ > 0)
    if cls.__basicsize__ > expected or not (hasattr(value, "__dict__") or num_slots(cls)):
        return "it is of a class of C, or derived from one, and what that holds can't be seen"
    return None


def _builtin(cls: type) -> Any:
    """What a class is derived from in the end."""
    return next((each for each in (dict, list) if issubclass(cls, each)), object)


def has_state_methods(value: object) -> bool:
    """Whether an environment says itself what its state is."""
    if not isinstance(value, EnvBase):
        return False
    methods = (getattr(type(value), name, None) for name in ("get_state", "set_state"))
    # TorchRL has a set_state of its own.
    return all(callable(each) and not each.__module__.startswith("torchrl.") for each in methods)


def made_anew(cls: type) -> Any:
    """A new object, without what its constructor does; but a module has hooks."""
    value = _builtin(cls).__new__(cls)
    if isinstance(value, nn.Module):
        nn.Module.__init__(value)
    return value


def set_attributes(value: Any, read: dict[str, Any]) -> None:
    """Give an object these attributes, and no others but those that it keeps."""
    for name in attributes(value).keys() - read.keys():
        object.__delattr__(value, name)
    for name, each in read.items():
        set_attribute(value, name, each)


def of_the_process(cls: type) -> dict[str, Any]:
    """What the module of a class and the class itself hold, by name; in short containers too.

    It is no state of an environment. Classes are those of the module alone.
    """
    found: dict[str, Any] = {}
    for names, prefix in (globals_of(cls), cls.__module__), (vars(cls), class_name(cls)):
        for name, value in list(names.items()):
            if isinstance(value, type):
                if value.__module__ == cls.__module__:
                    found[class_name(value)] = value
            elif not name.startswith("__") and not isinstance(value, _NO_STATE):
                found |= {f"{prefix}.{name}": value, **_within(value, f"{prefix}.{name}")}
    return found


_MOST_WITHIN = 1000
_NO_STATE = (*ATOMS, types.ModuleType, types.FunctionType, property)


def _within(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict | list | tuple) or len(value) > _MOST_WITHIN:
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    none = (*_NO_STATE, type)
    return {f"{name}[{key!r}]": each for key, each in items if not isinstance(each, none)}


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
