"""The environments of gymnasium's ``SyncVectorEnv``, looked at as if each were alone.

It turns what they return into one array of all, of the data type of the batch. So 1e39 becomes
infinite, and a number of the infos gets the type of the first one. In `AutoresetMode.SAME_STEP` it
keeps no more than a reference to a last observation while it resets. What a wrapper around the
batch may still change, NaN or a large reward, is left to who reads that. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from torchrl_hts._executor.observations import ObservationReader, observation_fields
from torchrl_hts._executor.old_gym import checked_reset
from torchrl_hts._executor.values import has_arrays, reward_number
from torchrl_hts._rounds.shared_memory import Array
from torchrl_hts.errors import EnvError

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
        space: of what it observes. Parts of it that are no arrays are left as they are.

    Attributes:
        env: as given.
        info: of its last step.
    """

    def __init__(self, env: Any, space: gym.Space[Any]) -> None:
        self.env = env
        self.info: Any = {}
        self._shape: Any = None  # of a Dict, whose parts have theirs
        if has_arrays(space):
            ((field, _),) = observation_fields(space)
            self._shape, self._dtype = field.shape, field.storage_dtype
        self._convert = _converter(space)

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
        if (
            type(observation) is np.ndarray
            and observation.shape == self._shape
            and observation.dtype == self._dtype
        ):
            return observation
        return self._convert(observation)


def _converter(space: gym.Space[Any]) -> Callable[[Any], Any]:
    """Makes an observation of the data types of its space, but for parts that are no arrays."""
    with contextlib.suppress(TypeError, EnvError):
        reader = ObservationReader(space, may_be_nan=True)
        return lambda seen: _together(space, iter(reader.read(seen)))
    if isinstance(space, gym.spaces.Dict):
        named = {name: _converter(part) for name, part in space.spaces.items()}
        return lambda seen: {name: convert(seen[name]) for name, convert in named.items()}
    if isinstance(space, gym.spaces.Tuple):
        parts = [_converter(part) for part in space.spaces]
        return lambda seen: tuple(convert(part) for convert, part in zip(parts, seen, strict=True))
    return lambda seen: seen


def _together(space: gym.Space[Any], arrays: Iterator[Array]) -> Any:
    """An observation of the arrays that its reader has taken it apart into."""
    if isinstance(space, gym.spaces.Dict):
        return {name: _together(child, arrays) for name, child in space.spaces.items()}
    return next(arrays)
