"""What the policy wrote, as an action of a gymnasium space. Knows nothing of torch."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array
from torchrl_hts.errors import InvalidValueError

__all__ = ["ActionReader", "action_reader"]

ActionReader = Callable[[int, int], Any]


def action_reader(
    space: gym.Space[Any], key: Key, rows: Callable[..., list[Array]]
) -> ActionReader:
    """A function of (slot, t) that turns the policy's action into one of the space.

    Discrete actions may be indices or one-hot, MultiDiscrete ones indices or concatenated
    one-hots: the policy's distribution decides.

    The function raises InvalidValueError for an index or a bit that the space doesn't have, and for
    numbers that the space's data type can't hold. Bounds are for the environment to see to.
    """
    if isinstance(space, gym.spaces.Dict):
        parts = {
            name: action_reader(child, (*key, name), rows) for name, child in space.spaces.items()
        }
        return lambda slot, t: {name: read(slot, t) for name, read in parts.items()}
    actions = rows(*key)
    if isinstance(space, gym.spaces.Discrete):
        return _discrete(space, key, actions)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return _multi_discrete(space, key, actions)
    return _numbers(space, key, actions)


def _discrete(space: gym.spaces.Discrete, key: Key, actions: list[Array]) -> ActionReader:
    start, n = int(space.start), int(space.n)
    if actions[0][0].size > 1:
        return lambda slot, t: int(actions[slot][t].argmax()) + start

    if n == 1:  # be it an index or one-hot
        return lambda slot, t: start

    # Of words one by one, a memoryview is read in a fraction of an array's time.
    words: list[Any] = [
        row.data.cast("B").cast("q") if row.dtype == np.int64 else row.reshape(-1)
        for row in actions
    ]

    def index(slot: int, t: int) -> int:
        action = words[slot][t]
        if not 0 <= action < n:
            raise _no_index(key, action, space, f"0 to {n - 1}")
        return int(action) + start

    def whole(slot: int, t: int) -> int:
        action = actions[slot][t].item()
        if not 0 <= action < n or int(action) != action:
            raise _no_index(key, action, space, f"0 to {n - 1}")
        return int(action) + start

    return index if actions[0].dtype.kind in "iub" else whole


def _multi_discrete(
    space: gym.spaces.MultiDiscrete, key: Key, actions: list[Array]
) -> ActionReader:
    dtype: Any = space.dtype
    if actions[0][0].size == space.nvec.size:
        if actions[0].dtype == dtype == np.int64:
            # Read as numbers without a sign, those below 0 are larger than all others.
            most: Array = space.nvec.astype(np.uint64)
            start = space.start

            def int64_indices(slot: int, t: int) -> Array:
                action = actions[slot][t].reshape(space.shape)
                if 0 in (action.view(np.uint64) < most).tobytes():
                    raise _no_index(key, action, space, f"0 to {(space.nvec - 1).tolist()}")
                made: Array = action + start
                return made

            return int64_indices

        def indices(slot: int, t: int) -> Array:
            action = actions[slot][t].reshape(space.shape)
            made: Array = action.astype(dtype)
            if ((made != action) | (made < 0) | (made >= space.nvec)).any():
                raise _no_index(key, action, space, f"0 to {(space.nvec - 1).tolist()}")
            made += space.start
            return made

        return indices
    ends = np.cumsum(space.nvec.ravel())[:-1]

    def from_one_hots(slot: int, t: int) -> Array:
        parts = np.split(actions[slot][t].ravel(), ends)
        return np.array([p.argmax() for p in parts], dtype).reshape(space.shape) + space.start

    return from_one_hots


def _numbers(space: gym.Space[Any], key: Key, actions: list[Array]) -> ActionReader:
    """Of a Box or MultiBinary space; looked at only where its data type can lose something."""
    shape, dtype = space.shape, space.dtype
    assert dtype is not None
    if isinstance(space, gym.spaces.MultiBinary):
        return _bits(space, key, actions)
    if np.can_cast(actions[0].dtype, dtype, "safe"):
        return lambda slot, t: actions[slot][t].reshape(shape).astype(dtype)

    def checked(slot: int, t: int) -> Array:
        action = actions[slot][t].reshape(shape)
        with np.errstate(all="ignore"):
            made: Array = action.astype(dtype)
        lost = made != action if made.dtype.kind != "f" else np.isinf(made) & np.isfinite(action)
        if lost.any():
            raise InvalidValueError(
                f"the policy wrote {'.'.join(key)!r} with the value {action[lost].flat[0]!s}, "
                f"which the environment's action space can't hold: its data type is {dtype}. "
                "Clip or round it in the policy"
            )
        return made

    return checked


def _bits(space: gym.spaces.MultiBinary, key: Key, actions: list[Array]) -> ActionReader:
    shape, dtype = space.shape, space.dtype

    def bits(slot: int, t: int) -> Array:
        action = actions[slot][t].reshape(shape)
        made: Array = action != 0
        if (made != action).any():
            raise InvalidValueError(
                f"the policy wrote {'.'.join(key)!r} with the value "
                f"{action[made != action].flat[0]!s}; the environment's action space is "
                f"{space!r}, which takes 0 and 1. Draw them from torch.distributions.Bernoulli, "
                "for instance"
            )
        return made.astype(dtype)

    return bits


def _no_index(key: Key, action: Any, space: gym.Space[Any], has: str) -> InvalidValueError:
    return InvalidValueError(
        f"the policy wrote {'.'.join(key)!r} with the value {reprlib.repr(action)}; the "
        f"environment's action space {reprlib.repr(space)} takes the indices {has}, whatever its "
        "start: let the policy have as many actions"
    )
