"""The checks of batches, which need tensordict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase

__all__ = ["check_batch", "check_parts"]


def check_batch(batch: Any) -> TensorDictBase:
    """The batch itself; TypeError for what is none."""
    if not isinstance(batch, TensorDictBase):
        end = (
            ": next() and rollout() give None when all frames have been collected, and so does a "
            "collector with a replay_buffer, from which losses take samples"
        )
        raise TypeError(
            f"expected a batch, which is a TensorDict, and got {type(batch).__name__}"
            f"{end if batch is None else ''}"
        )
    return batch


def check_parts(data: Any) -> list[TensorDictBase]:
    """The parts of a batch, as `World.parts` has cut them."""
    return [*map(check_batch, data if isinstance(data, Iterable) else [data])]
