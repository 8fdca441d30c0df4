"""What a batch of environments returns, as arrays of the data types that batches hold, or an error.

Knows nothing of torch.
"""

from __future__ import annotations

from math import isnan
from typing import Any

import gymnasium as gym
import numpy as np
from numpy import vdot

from torchrl_hts._executor.gym_env import observation_fields
from torchrl_hts._executor.values import (
    FLOAT32_MAX,
    another_shape,
    checked_reward,
    converted,
    dict_levels,
    lacking,
    not_a_number,
    unknown_key,
)
from torchrl_hts._rounds.shared_memory import Array

__all__ = ["VectorReader", "check_rewards"]


class VectorReader:
    """Takes the observations of a batch apart into arrays, and looks whether they are well.

    Args:
        space: of one environment.

    Attributes:
        fields: one for each array, and the path of its value in an observation.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.fields = observation_fields(space)
        self._levels = dict_levels(space)

    def read(self, observations: Any, *lead: int) -> list[Array]:
        """The array of each field, ``[*lead, *shape]``.

        Raises:
            InvalidValueError: if an observation is not what its space says, or NaN.
        """
        arrays = []
        for field, path in self.fields:
            dtype = field.storage_dtype
            value = observations
            try:
                for part in path:
                    value = value[part]
            except (KeyError, TypeError, IndexError) as error:
                raise lacking(field) from error
            if type(value) is not np.ndarray or value.dtype != dtype:
                value = converted(value, field)
            if value.shape != (*lead, *field.shape):
                raise another_shape(value, field, *lead)
            # See `GymEnvironment._check`.
            if dtype.kind == "f" and isnan(vdot(value, value)):
                raise not_a_number(value, field)
            arrays.append(value)
        for path, names in self._levels:
            value = observations
            for part in path:
                value = value[part]
            if len(value) > len(names):
                raise unknown_key(value, names)
        return arrays


def check_rewards(rewards: Array) -> None:
    """Raise if a reward is NaN, or is finite and too large for float32.

    Args:
        rewards: ``[k]``.
    """
    if not (np.abs(rewards) <= FLOAT32_MAX).all():  # or infinite, which float32 holds
        for reward in rewards.tolist():
            checked_reward(reward)
