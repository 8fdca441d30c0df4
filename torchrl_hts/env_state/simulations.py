"""The exact state of a simulation of MuJoCo: an ``MjData``, and the ``MjModel`` that it is of.

``mj_getState`` gives what the coming steps are integrated from. Environments read more than that
before their next step: positions of bodies, say, which are those of before the last integration, so
that computing them anew gives others. ``MjData``'s own pickle holds all of it, contacts and the
solver's warm start too, and its model. So what an environment has changed in that (masses, gravity)
is saved as well.

The environment to restore keeps its own ``MjData`` and ``MjModel``, which wrappers and renderers
refer to; they are filled in place.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from torchrl_hts.env_state.attributes import is_a
from torchrl_hts.errors import CannotSaveError

__all__ = [
    "describe_simulation",
    "holds_memory_of",
    "is_renderer",
    "is_simulation",
    "restore_simulation",
    "save_simulation",
]

_SIGNATURE = "signature"  # of the compiler, not pickled: a number for models and what is of them
_RENDERERS = "gymnasium.envs.mujoco.mujoco_rendering"


def is_simulation(value: object) -> bool:
    """Whether something is an ``MjData``."""
    mujoco = sys.modules.get("mujoco")
    return mujoco is not None and is_a(value, mujoco.MjData)


def is_renderer(value: object) -> bool:
    """Whether something is gymnasium's renderer, which only shows what a simulation holds."""
    module = sys.modules.get(_RENDERERS)
    return module is not None and is_a(value, module.MujocoRenderer)


def describe_simulation(data: Any) -> list[str]:
    """What the saved simulation and the one to restore must have in common."""
    model = data.model
    sizes = [f"{name}={size}" for name, size in _fields(model) if isinstance(size, int)]
    digest = hashlib.sha256(" ".join(sizes).encode() + model.names).hexdigest()[:16]
    version = sys.modules["mujoco"].__version__
    return [f"simulation of mujoco {version} whose model has the sizes and names {digest}"]


def holds_memory_of(data: Any, array: np.ndarray[Any, Any]) -> bool:
    """Whether an array is a view of what a simulation, or its model, keeps."""
    arrays = [value for one in (data, data.model) for value in _arrays(one)]
    return any(np.may_share_memory(array, value) for value in arrays)


def save_simulation(data: Any) -> bytes:
    """The state of a simulation, between any two calls of MuJoCo.

    Raises:
        CannotSaveError: it has parts that MuJoCo doesn't pickle; says which.
    """
    if data.model.nplugin:
        raise CannotSaveError("what plugins of MuJoCo keep can't be saved")
    if getattr(data, "threadpool", 0):
        raise CannotSaveError("a simulation with a pool of threads can't be saved")
    state: bytes = data.__getstate__()
    return state


def restore_simulation(data: Any, state: bytes) -> None:
    """Bring a simulation to where another one of the same description was.

    Raises:
        ValueError: the state is damaged, or its model has another make.
    """
    mujoco = sys.modules["mujoco"]
    saved: Any = mujoco.MjData.__new__(mujoco.MjData)
    saved.__setstate__(state)
    try:
        _copy_fields(saved.model, data.model)
        mujoco.mj_copyData(data, data.model, saved)
    except mujoco.FatalError as error:
        raise ValueError(f"the simulation can't be filled: {error}") from error
    if data.__getstate__() != state:
        raise ValueError("the simulation, filled with what was saved, is not what was saved")


def _fields(struct: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(struct):
        value = None if name.startswith("_") else getattr(struct, name)
        if value is not None and not callable(value) and name != _SIGNATURE:
            yield name, value


def _arrays(struct: Any) -> Iterator[np.ndarray[Any, Any]]:
    for _, value in _fields(struct):
        if isinstance(value, np.ndarray):
            yield value
        elif _is_struct(value):
            yield from _arrays(value)


def _is_struct(value: object) -> bool:
    """A part of a model, such as its options; an ``MjData`` refers to its model."""
    of_mujoco = type(value).__module__.startswith("mujoco.")
    return of_mujoco and not isinstance(value, sys.modules["mujoco"].MjModel)


def _copy_fields(source: Any, target: Any) -> None:
    """Set what differs, by its bits."""
    for name, value in _fields(source):
        if isinstance(value, np.ndarray):
            array = getattr(target, name)
            if array.tobytes() != value.tobytes():
                array[...] = value
        elif isinstance(value, int | float):
            if getattr(target, name) != value:
                setattr(target, name, value)
        elif _is_struct(value):
            _copy_fields(value, getattr(target, name))
