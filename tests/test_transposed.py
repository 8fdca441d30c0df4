"""Linear layers that multiply the other way round."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchrl_hts.transposed import TransposedLinear, transpose_layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (1, 7), (5, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_transposed_layer_is_the_layer(
    bias: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(7, 4, bias=bias, dtype=dtype)
    inputs = torch.randn(shape).to(dtype)
    expected = layer(inputs)
    assert transpose_layers(layer)
    output = layer(inputs)
    torch.testing.assert_close(output, expected)
    assert output.is_contiguous()


def test_every_plain_linear_layer_is_transposed_and_no_other() -> None:
    class Own(nn.Linear):
        """A layer that may do anything."""

    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Own(2, 2), nn.Linear(2, 1)), nn.Tanh())
    parameters = [*net.parameters()]
    assert transpose_layers(net)
    assert [type(m) for m in net.modules() if isinstance(m, nn.Linear)] == [
        TransposedLinear, Own, TransposedLinear,
    ]  # fmt: skip
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert not transpose_layers(nn.Sequential(nn.Tanh(), Own(1, 1)))
