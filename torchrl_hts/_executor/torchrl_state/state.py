"""The exact state of a TorchRL environment, to go on from in a new process, bit for bit.

An environment is a graph of objects: transforms, the environment at the bottom, and what these
hold. Another of the same make has them too. What is saved are their attributes, as plain data, and
they are filled in place, or made anew without their constructor where it has none there. A
gymnasium environment in it is saved by its own rules (`torchrl_hts.env_state`).

What a state may name is what the environment had after its first step: classes, functions, and what
the modules of these classes hold, which is the process's.

Not saved: specs, module globals, attributes of classes, and generators of the process, which
executors save. Refused is what can't be seen from Python, such as engines in C, and what a new
environment couldn't have. An `EnvBase` that defines ``get_state()`` and ``set_state(state)`` is
saved by these alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

import gymnasium as gym
from torchrl.envs import EnvBase

from torchrl_hts._executor.torchrl_state.reader import StateReader
from torchrl_hts._executor.torchrl_state.writer import Makeup, StateWriter
from torchrl_hts.env_state import names_of, restore_environment, save_environment
from torchrl_hts.env_state.compressed import compressed, decompressed
from torchrl_hts.env_state.sealed import opened, sealed
from torchrl_hts.errors import CannotSaveError

__all__ = ["TorchRLState"]

_MAGIC = b"torchrl_hts TorchRL environment 1\n"


class TorchRLState:
    """Saves and restores a TorchRL environment.

    Args:
        env: the environment, before its first reset.
        gymnasium: the gymnasium environments in it.
    """

    def __init__(self, env: EnvBase, gymnasium: Iterable[gym.Env[Any, Any]] = ()) -> None:
        self._env = env
        self._makeup: Makeup | None = None
        self._obstacle: str | None = None
        self._names = {id(one): names_of(one) for one in gymnasium}

    def look(self) -> None:
        """Find out what the environment is made of, after its first step; does nothing later."""
        if self._makeup is not None or self._obstacle is not None:
            return
        try:
            found = _looked_at(self._env)
            _check_apart(found)
            self._makeup = found.makeup
        except CannotSaveError as error:  # it can be used nevertheless
            self._obstacle = str(error)
        except Exception as error:
            self._obstacle = f"looking at it failed with {type(error).__name__}: {error}"

    def save(self, own: object) -> bytes:
        """The state between two steps; the environment goes on as if it had not been saved.

        Args:
            own: saved along; may share memory and objects with the environment.

        Raises:
            CannotSaveError: a part of the environment can't be saved for sure; says which, and why.
        """
        if self._makeup is None:
            why = self._obstacle or "it has made no step yet"
            raise CannotSaveError(f"the environment can't be saved: {why}")
        writer = StateWriter(self._makeup)
        records = writer.write_all((self._env, ""), (own, ".own"))
        parts = {
            path: save_environment(one, names=self._names.get(id(one)))
            for path, one in writer.gymnasium().items()
        }
        body = compressed(pickle.dumps((writer.memory.finish(), records, parts), protocol=5))
        return sealed(_MAGIC, body)

    def restore(self, state: bytes) -> Any:
        """Put the environment, after a reset, into a state; returns what was saved along.

        Args:
            state: from `save`, of an environment that the same factory has made.

        Raises:
            ValueError: the state is damaged, or that of an environment of another make, or has what
                the environment may have only after its first step.
        """
        body = opened(_MAGIC, state, "a collector's state_dict() or TorchRLReplay.save()")
        try:
            new = _looked_at(self._env)
            pieces, records, parts = _PlainData(io.BytesIO(decompressed(body))).load()
            reader = StateReader(new, pieces)
            _, own = (reader.read(record) for record in records)
            gymnasium = new.gymnasium()
            for path in parts:
                if path not in gymnasium:
                    raise ValueError(f"it has no gymnasium environment at env{path}")
        except Exception as error:
            raise ValueError(
                f"the environment's state can't be read here: {error}. Restore it with the "
                "factory, the code and the package versions that saved it"
            ) from error
        for path, part in parts.items():
            one = gymnasium[path]
            restore_environment(one, part, names=self._names.get(id(one)))
        reader.apply()
        self._makeup = self._makeup or new.makeup
        return own


def _looked_at(env: EnvBase) -> StateWriter:
    writer = StateWriter()
    writer.write_all((env, ""))
    return writer


def _check_apart(found: StateWriter) -> None:
    """Raise CannotSaveError if a gymnasium environment shares objects with what is around it."""
    others = [found]
    for path, layer in found.gymnasium().items():
        inner, attributes = StateWriter(), []
        while True:
            attributes += [(value, f"{path}.{name}") for name, value in vars(layer).items()]
            if not isinstance(layer, gym.Wrapper):
                break
            layer = layer.env
        inner.write_all(*attributes)
        for other in others:
            if (shared := other.shares(inner)) is not None:
                raise CannotSaveError(
                    f"env{path} and another part of the environment share a "
                    f"{type(shared).__qualname__}, and they are saved apart: give each its own"
                )
        others.append(inner)


class _PlainData(pickle.Unpickler):
    """Reads no name of a function or a class."""

    def find_class(self, module: str, name: str) -> Any:
        """There is none in a state."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, and may name nothing")
