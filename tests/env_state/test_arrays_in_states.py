"""Arrays in states of environments: memory that is shared, and what pickle alone would change."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from resumption import Plain

from torchrl_hts.env_state import restore_environment, save_environment


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_arrays_keep_the_order_of_their_axes_in_memory(order: tuple[int, ...]) -> None:
    """Sums depend on it, in their last bits."""
    owner = np.arange(24.0).reshape(2, 3, 4).transpose(order) * 1.0
    env, restored = (
        Plain([owner, owner[1:, ::-1], np.broadcast_to(owner, (2, *owner.shape))]),
        Plain(),
    )
    restore_environment(restored, save_environment(env))
    for before, after in zip(env.value, restored.value, strict=True):
        assert before.strides == after.strides
        assert np.array_equal(before, after)
    assert np.shares_memory(*restored.value[:2])


def locked(array: Any) -> Any:
    array.flags.writeable = False
    return array


PACKED = np.dtype([("a", ">i4"), ("b", "<f4")])
WITH_GAPS = np.dtype({"names": ["a", "b"], "formats": [">i4", "<f4"], "offsets": [2, 9]})
OVERLAPPING = np.dtype({"names": ["a", "b"], "formats": [">u8", ">u2"], "offsets": [0, 0]})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("dtype", ["<f8", ">f8", PACKED, WITH_GAPS, OVERLAPPING])
def test_arrays_keep_their_order_of_bytes_and_whether_they_may_be_written_to(
    dtype: Any, order: tuple[int, ...]
) -> None:
    """An environment may go another way where it can't write, or look at the bytes."""
    size = np.dtype(dtype).itemsize
    owner = np.empty((2, 3), dtype).transpose(order).copy("A")
    memory: Any = np.ndarray(owner.nbytes, np.uint8, owner.T if order[0] else owner)
    memory[:] = np.arange(6 * size)
    lent = np.frombuffer(owner.tobytes(), dtype)
    arrays = [owner, owner[1:], locked(owner[:1]), locked(owner.copy("A")), lent]
    env, restored, again = Plain(arrays), Plain(), Plain()
    restore_environment(restored, save_environment(env))
    restore_environment(again, save_environment(restored))
    for after in (restored.value, again.value):
        for one, other in zip(arrays, after, strict=True):
            assert repr(one.dtype) == repr(other.dtype)
            assert (one == other).all()
            if one.flags.forc:  # else numpy makes up what is in the gaps
                assert one.tobytes("A") == other.tobytes("A")
            assert (one.strides, one.flags.writeable) == (other.strides, other.flags.writeable)
        assert np.shares_memory(after[0], after[1])
        assert np.shares_memory(after[0], after[2])


def test_arrays_that_were_broadcast_together() -> None:
    """Numpy warns of what writes to them, and wouldn't of who asks."""
    env, restored = Plain(np.broadcast_arrays(np.zeros(3), np.zeros((2, 1)))), Plain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore_environment(restored, save_environment(env))
    assert [one.shape for one in restored.value] == [(2, 3)] * 2
