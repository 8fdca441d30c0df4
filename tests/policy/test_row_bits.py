"""Rows are told apart by their bytes, and long ones by a hash of these."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_hts._policy.row_bits import row_bits, row_marks


def test_row_bits_tell_zeros_apart_and_nan_equal() -> None:
    values = torch.tensor([0.0, -0.0, float("nan"), float("nan")])
    bits = row_bits([values, torch.zeros(4, 0), torch.zeros(4, 2, 2, dtype=torch.bfloat16)])
    assert bits.shape == (4, 4 + 8)
    assert (bits[0] != bits[1]).any()
    np.testing.assert_array_equal(bits[2], bits[3])


@pytest.mark.parametrize("shape", [(3,), (2000,), (8, 20, 20), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_marks_tell_the_same_rows_apart_as_bytes(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    rows = torch.randint(0, 9, (1, *shape)).to(dtype).repeat(6, *[1] * len(shape))
    flat = rows.reshape(6, -1)
    flat[4:, -1:] += 1
    tensors = [torch.arange(3).repeat_interleave(2), rows]
    bits, marks = row_bits(tensors), row_marks(tensors)
    same = (bits[:, None] == bits).all(-1)
    np.testing.assert_array_equal((marks[:, None] == marks).all(-1), same)
    assert same.sum() == 12
    assert marks.shape[1] <= 8 + 40


def test_marks_depend_on_no_mates_and_no_layout() -> None:
    """A row alone has strides of its own, and what broadcasts has none."""
    rows = torch.randn(5, 8, 20, 20)
    marks = row_marks([rows])
    np.testing.assert_array_equal(row_marks([rows[2:3]]), marks[2:3])
    np.testing.assert_array_equal(row_marks([rows[[4, 1]]]), marks[[4, 1]])
    last = rows.contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(row_marks([last]), marks)
    np.testing.assert_array_equal(row_marks([last[2:3]]), marks[2:3])
    one = torch.zeros(1).expand(1, 8, 20, 20)
    np.testing.assert_array_equal(row_marks([one]), row_marks([torch.zeros_like(rows)])[:1])


def test_long_rows_take_few_bytes() -> None:
    """Those of all layers of a network, for thousands of rows, would be gibibytes."""
    assert row_marks([torch.zeros(4, 12_800), torch.zeros(4, 512)]).shape == (4, 16)
