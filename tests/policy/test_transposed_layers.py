"""Linear layers that multiply the other way round."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from torchrl_hts._policy.transposed_layers import is_transposed, transpose_layers


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
    transpose_layers(layer, True)
    for each in (layer, deepcopy(layer)):
        assert is_transposed(each)
        output = each(inputs)
        torch.testing.assert_close(output, expected)
        assert output.is_contiguous()
    transpose_layers(layer, False)
    assert torch.equal(layer(inputs), expected)
    assert "forward" not in vars(layer)


def test_a_layer_whose_parameters_are_pruned_or_nested_inputs_work_too() -> None:
    layer = nn.Linear(7, 4)
    for name in ("weight", "bias"):
        prune.l1_unstructured(layer, name, amount=0.5)
    inputs = torch.randn(5, 7)
    nested = torch.nested.nested_tensor([torch.randn(2, 7), torch.randn(3, 7)])
    expected = layer(inputs), layer(nested).to_padded_tensor(0.0)
    transpose_layers(layer, True)
    torch.testing.assert_close(layer(inputs), expected[0])
    assert torch.equal(layer(nested).to_padded_tensor(0.0), expected[1])


def test_every_plain_linear_layer_is_transposed_and_no_other() -> None:
    class Own(nn.Linear):
        """A layer that may do anything."""

    patched = nn.Linear(2, 2)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    net = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(Own(2, 2), nn.Linear(2, 1)), nn.Tanh(), patched
    )
    for transposed in (True, True, False):
        transpose_layers(net, transposed)
        linear = [is_transposed(m) for m in net.modules() if isinstance(m, nn.Linear)]
        assert linear == [transposed, False, transposed, False]
        assert torch.equal(patched(torch.ones(2)), torch.ones(2))
