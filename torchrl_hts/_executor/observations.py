"""What environments observe, one or a batch of them, as arrays that batches hold, or an error.

Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from typing import Any

import gymnasium as gym
import numpy as np
from numpy import vdot

from torchrl_hts._executor.values import (
    another_shape,
    check_keys,
    converted,
    dict_levels,
    has_arrays,
    lacking,
    not_a_number,
    unknown_key,
    unsupported_observation,
)
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array, Field

__all__ = ["ObservationReader", "observation_fields", "with_own_memory"]


def with_own_memory(observation: Any) -> Any:
    """An observation whose arrays own their memory, so that it can be saved.

    Others lie where an engine in another language keeps them. Copies do: it is only read again.
    """
    if isinstance(observation, np.ndarray):
        owner: Any = observation
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return observation if owner.base is None else observation.copy()
    if type(observation) is dict:
        return {key: with_own_memory(value) for key, value in observation.items()}
    if type(observation) is tuple:
        return tuple(map(with_own_memory, observation))
    return observation


def observation_fields(space: gym.Space[Any]) -> list[tuple[Field, tuple[str, ...]]]:
    """Fields of an observation space, each with the path of its value in the observation.

    Raises:
        TypeError: if the space, or a part of it, is of a kind that has no fixed array shape.
    """
    if not isinstance(space, gym.spaces.Dict):
        return [(_leaf(("observation",), space, space), ())]
    check_keys("observation", space)
    return [(_leaf(path, leaf, space), path) for path, leaf in _leaves((), space)]


def _leaves(path: Key, space: gym.Space[Any]) -> Iterable[tuple[Key, gym.Space[Any]]]:
    if isinstance(space, gym.spaces.Dict):
        for name, child in space.spaces.items():
            yield from _leaves((*path, name), child)
    else:
        yield path, space


def _leaf(key: Key, space: gym.Space[Any], whole: gym.Space[Any]) -> Field:
    if not has_arrays(space):
        raise unsupported_observation(key, space, whole)
    return Field(key, tuple(space.shape or ()), np.dtype(space.dtype).name)


class ObservationReader:
    """Takes observations apart into arrays, and looks whether they are well.

    Args:
        space: of one environment.
        may_be_nan: whether NaN is taken.

    Attributes:
        fields: one for each array.
    """

    def __init__(self, space: gym.Space[Any], *, may_be_nan: bool = False) -> None:
        found = observation_fields(space)
        self.fields = [field for field, _ in found]
        # Looked up once: it is done in each step of an environment, which may be a fast one.
        self._parts = [
            (field, field.shape, dtype, dtype.kind == "f" and not may_be_nan, path)
            for field, path in found
            for dtype in [field.storage_dtype]
        ]
        self._levels = dict_levels(space)

    def read(self, observation: Any, *lead: int) -> list[Array]:
        """The array of each field, ``[*lead, *shape]``.

        Args:
            observation: of one environment, or of a batch.
            lead: k, where they are a batch's.

        Raises:
            InvalidValueError: if it is not what its space says, or NaN.
        """
        arrays = []
        for field, shape, dtype, looked_at, path in self._parts:
            value = observation
            if path:
                try:
                    for name in path:
                        value = value[name]
                except (KeyError, TypeError, IndexError) as error:
                    raise lacking(field) from error
            if type(value) is not np.ndarray or value.dtype != dtype:
                value = converted(value, field)
            if value.shape != (lead + shape if lead else shape):
                raise another_shape(value, field, *lead)
            # A square is never NaN but for NaN; one call of BLAS costs less than isnan and any, and
            # this one doesn't warn where a square is too large.
            if looked_at and isnan(vdot(value, value)):
                raise not_a_number(value, field)
            arrays.append(value)
        for path, names in self._levels:
            value = observation
            for name in path:
                value = value[name]
            if len(value) > len(names):
                raise unknown_key(value, names, path, *lead)
        return arrays
