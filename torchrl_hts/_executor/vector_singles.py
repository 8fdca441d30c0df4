"""The environments of gymnasium's ``SyncVectorEnv``, looked at as if each were alone.

It turns what they return into one array of all, of the data type of the batch. So 1e39 becomes
infinite, and a number of the infos gets the type of the first one. In `AutoresetMode.SAME_STEP` it
keeps no more than a reference to a last observation while it resets. What a wrapper around the
batch may still change, NaN or a large reward, is left to who reads that. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from torchrl_hts._executor.observations import ObservationReader
from torchrl_hts._executor.old_gym import checked_reset
from torchrl_hts._executor.values import reward_number
from torchrl_hts._rounds.shared_memory import Array

__all__ = ["Single", "read_singly"]


def read_singly(env: VectorEnv[Any, Any, Any]) -> list[Single]:
    """Put a `Single` around each environment of a plain `SyncVectorEnv`; returns these.

    Args:
        env: a batch, with any wrappers; other engines are left alone.
    """
    own = env.unwrapped
    if type(own) is not SyncVectorEnv:
        return []
    envs = [one.env if isinstance(one, Single) else one for one in own.envs]
    singles = [Single(one, own.single_observation_space) for one in envs]
    own.envs = singles  # type: ignore[assignment]
    return singles


class Single:
    """An environment whose observations and rewards are what batches hold, or an error.

    Otherwise it is what is in it.

    Args:
        env: the environment.
        space: of what it observes. If that is no array, nor arrays in a Dict, it is left as it is.

    Attributes:
        env: as given.
        info: of its last step.
    """

    def __init__(self, env: Any, space: gym.Space[Any]) -> None:
        self.env = env
        self.info: Any = {}
        self._space = space
        self._shape: Any = None  # of a Dict, whose parts have theirs
        self._reader: ObservationReader | None = None
        with contextlib.suppress(TypeError):
            self._reader = ObservationReader(space, may_be_nan=True)
        if self._reader is not None and not isinstance(space, gym.spaces.Dict):
            (field,) = self._reader.fields
            self._shape, self._dtype = field.shape, field.storage_dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("env"), name)

    def reset(self, **options: Any) -> tuple[Any, Any]:
        """Begin an episode."""
        outcome = self.env.reset(**options)
        return self._read(checked_reset(outcome)), outcome[1] or {}

    def step(self, action: Any) -> tuple[Any, float, Any, Any, Any]:
        """Make a step."""
        observation, reward, terminated, truncated, self.info = self.env.step(action)
        observation = self._read(observation)
        if terminated or truncated:  # before the reset, which may write to the same array
            observation = deepcopy(observation)
        return observation, reward_number(reward), terminated, truncated, self.info or {}

    def _read(self, observation: Any) -> Any:
        """An observation of the data types of its space."""
        if self._reader is None or (
            type(observation) is np.ndarray
            and observation.shape == self._shape
            and observation.dtype == self._dtype
        ):
            return observation
        return _together(self._space, iter(self._reader.read(observation)))


def _together(space: gym.Space[Any], arrays: Iterator[Array]) -> Any:
    """An observation of the arrays that its reader has taken it apart into."""
    if isinstance(space, gym.spaces.Dict):
        return {name: _together(child, arrays) for name, child in space.spaces.items()}
    return next(arrays)
