"""Rows of a slot, and environments that are stepped in them without anybody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchrl_hts._executor.gym_env import RowOptions
from torchrl_hts._executor.info import info_fields
from torchrl_hts._executor.observations import observation_fields
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array, Field, Layout, SharedMemory

WRITES_ALL = RowOptions(0, True, (("action",),), ())


def memory_for(
    space: Any,
    action: Field,
    units: Sequence[int],
    options: RowOptions = WRITES_ALL,
    *,
    sync_interval: int = 5,
    more: Sequence[Field] = (),
) -> SharedMemory:
    """One slot for units of so many environments."""
    fields = [field for field, _ in observation_fields(space)]
    if options.write_next_observation:
        fields += [Field(("next", *f.key), f.shape, f.dtype) for f in fields]
    flags = ("done", "terminated", "truncated")
    fields += [Field(("next", name), (1,), "bool") for name in flags]
    fields += [Field(("next", "reward"), (1,), "float32"), action, *more]
    fields.append(Field(("collector", "traj_ids"), (), "int64"))
    if options.max_frames_per_traj:
        keys: list[Key] = [("step_count",), ("next", "step_count")]
        fields += [Field(key, (1,), "int64") for key in keys]
    if options.write_is_init:
        fields.append(Field(("is_init",), (1,), "bool"))
    fields += info_fields(options.info_keys, [field.key for field in fields])
    num_envs = sum(units)
    alone = set(units) == {1}
    layout = Layout(
        num_envs, sync_interval, 0, 1, tuple(fields), (), units=() if alone else tuple(units)
    )
    return SharedMemory(SharedMemory.create_fd(), layout)


def play_round(
    environments: Sequence[Any],
    memory: SharedMemory,
    act: Callable[[int], dict[Key, Array]],
) -> dict[Key, Array]:
    """Step all environments through a round; returns what has been written.

    Args:
        environments: each is a unit, bound to its rows.
        memory: of one slot.
        act: gives, by key, what a policy would have written at a step, ``[N, ...]``.
    """
    fields = memory.fields(0)
    for t in range(memory.layout.sync_interval):
        for environment in environments:
            environment.write_observation(0, t)
        for key, value in act(t).items():
            fields[key][:, t] = value
        for environment in environments:
            environment.step(0, t)
    return {key: array.copy() for key, array in fields.items()}


def assert_equal_bits(one: dict[Key, Array], other: dict[Key, Array]) -> None:
    """NaN equals itself."""
    assert one.keys() == other.keys()
    for key, array in one.items():
        assert array.tobytes() == other[key].tobytes(), key
        assert isinstance(array, np.ndarray)
