"""What the policy wrote for a batch of environments, as actions of its space. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from torchrl_hts._executor.gym_actions import ActionReader, action_reader
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array

__all__ = ["vector_action_reader"]


def vector_action_reader(
    space: gym.Space[Any], count: int, key: Key, rows: Callable[..., list[Array]]
) -> ActionReader:
    """A function of (slot, t) that turns the policy's actions into those of a batch.

    See `action_reader` for what the policy may write, and what raises.

    Args:
        space: of one environment.
        count: how many there are, k.
        key: where the policy writes.
        rows: gives, by key, an array ``[T, k, *shape]`` for each slot.
    """
    if isinstance(space, gym.spaces.Dict):
        parts = {
            name: vector_action_reader(child, count, (*key, name), rows)
            for name, child in space.spaces.items()
        }
        return lambda slot, t: {name: read(slot, t) for name, read in parts.items()}
    if isinstance(space, gym.spaces.Discrete):
        actions, start, dtype = rows(*key), int(space.start), space.dtype
        if actions[0][0].size > count:  # one-hot
            return lambda slot, t: actions[slot][t].argmax(-1).astype(dtype) + start
        if space.n == 1:  # be it an index or one-hot
            return lambda slot, t: np.full(count, start, dtype)
    # Of these gymnasium makes a Box, which wouldn't tell what is none of their actions.
    if isinstance(space, gym.spaces.MultiBinary):
        return action_reader(gym.spaces.MultiBinary((count, *space.shape)), key, rows)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return _multi_discrete(space, count, key, rows)
    return action_reader(batch_space(space, count), key, rows)


def _multi_discrete(
    space: gym.spaces.MultiDiscrete, count: int, key: Key, rows: Callable[..., list[Array]]
) -> ActionReader:
    dtype: Any = space.dtype
    all_shape = (count, *space.shape)
    actions = rows(*key)
    if actions[0][0].size == count * space.nvec.size:  # indices
        nvec, start = (np.broadcast_to(part, all_shape) for part in (space.nvec, space.start))
        return action_reader(gym.spaces.MultiDiscrete(nvec, dtype, start=start), key, rows)
    ends = np.cumsum(space.nvec.ravel())[:-1]

    def from_one_hots(slot: int, t: int) -> Array:
        parts = np.split(actions[slot][t].reshape(count, -1), ends, axis=1)
        found = np.stack([part.argmax(-1) for part in parts], axis=1).astype(dtype)
        made: Array = found.reshape(all_shape) + space.start
        return made

    return from_one_hots
