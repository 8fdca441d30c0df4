"""How batches get into a replay buffer.

Axes: N environments, T steps of a round.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.envs import MultiStepTransform, Reward2GoTransform

__all__ = ["check_buffer", "extend"]

_OVER_TIME = (MultiStepTransform, Reward2GoTransform)  # they take the last dimension for time


def check_buffer(
    buffer: ReplayBuffer | None, num_envs: int, *, is_flat: bool, splits: bool
) -> None:
    """Raise ValueError if a buffer can't hold the batches, or would mix up their environments.

    Args:
        buffer: None for no buffer.
        num_envs: N.
        is_flat: whether batches are ``[N * T]``, or ``[T]``.
        splits: whether they are trajectories.
    """
    if buffer is None or splits:
        return
    if is_flat and _num_dims(buffer) > 1:
        raise ValueError(
            f"the storage of replay_buffer has {_num_dims(buffer)} dimensions, and batches are "
            "flat: give one of one dimension, or the environments as a list, without cat_results"
        )
    transform = getattr(buffer, "transform", None)
    parts = transform.modules() if transform is not None else ()
    over_time = [type(part).__name__ for part in parts if isinstance(part, _OVER_TIME)]
    if over_time and num_envs > 1 and _num_dims(buffer) == 1:
        raise ValueError(
            f"the {over_time[0]} of replay_buffer would go on from one environment's steps to the "
            f"next one's: with {num_envs} environments give a storage of two dimensions, as "
            "ReplayBuffer(storage=LazyTensorStorage(size, ndim=2), dim_extend=1), or let postproc "
            "do it"
        )


def extend(buffer: ReplayBuffer, batch: TensorDictBase, *, splits: bool) -> None:
    """Put a batch into a buffer, whose items are steps unless its storage has more dimensions.

    Args:
        batch: ``[N, T]``, ``[N * T]``, ``[T]``, or trajectories.
        splits: whether it is trajectories, which are the items then.
    """
    steps_are_items = _num_dims(buffer) == 1 and not splits
    buffer.extend(batch.reshape(-1) if steps_are_items else batch)


def _num_dims(buffer: ReplayBuffer) -> int:
    """Of the storage; which one in another process doesn't show."""
    storage: Any = getattr(buffer, "storage", None)
    return int(getattr(storage, "ndim", 1))
