"""Layers of tanh that run in numpy."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    biased_softplus,
)
from torch import Tensor, nn
from torch.autograd import forward_ad

from torchrl_hts._policy.numpy_layers import NumpyTanh, OneScale, layers_in_numpy


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_the_tanh_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = (3 * torch.randn(shape)).to(dtype)
    kept = inputs.clone()
    with torch.inference_mode():
        output = NumpyTanh()(inputs)
    assert torch.equal(inputs, kept)
    torch.testing.assert_close(output, torch.tanh(inputs))


MAPPINGS = ["exp", "softplus", "biased_softplus_1.0", "biased_softplus_0.5_0.001", "relu"]


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scales_are_those_of_torch(mapping: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = (10 * torch.randn(50, 6)).to(dtype)
    inputs[0, 3:] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    extract = NormalParamExtractor(mapping, scale_lb=1e-3)
    loc, scale = extract(inputs)
    inside = nn.Sequential(extract)
    layers_in_numpy(inside)
    assert (extract.scale_mapping is not torch.relu) == (mapping != "relu")
    with torch.inference_mode():
        got = inside(inputs)
    assert torch.equal(got[0], loc)
    torch.testing.assert_close(got[1], scale, equal_nan=True)
    needs = inputs[1:].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(inside(needs)[1].sum(), needs)
    (expected,) = torch.autograd.grad(NormalParamExtractor(mapping, 1e-3)(needs)[1].sum(), needs)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("mapping", ["exp", "softplus"])
def test_small_scales_keep_their_digits(mapping: str) -> None:
    extract, inputs = NormalParamExtractor(mapping, scale_lb=0.0), torch.full((5, 6), -40.0)
    _, expected = extract(inputs)
    layers_in_numpy(extract)
    with torch.inference_mode():
        torch.testing.assert_close(extract(inputs)[1], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_written_over_its_input_where_numpy_can(dtype: torch.dtype) -> None:
    inputs = torch.linspace(-3, 3, 7).to(dtype)
    expected = torch.tanh(inputs)
    with torch.inference_mode():
        output = NumpyTanh().overwrite(inputs)
    torch.testing.assert_close(output, expected)
    assert (output is inputs) == (dtype == torch.float32)


@pytest.mark.parametrize(
    "mapping",
    [
        lambda: biased_softplus(torch.tensor([0.5, 1.0, 2.0])),
        lambda: biased_softplus(1.0, torch.tensor([0.1, 0.2, 0.3])),
        lambda: biased_softplus(1.0, np.float64(0.1)),
    ],
)
def test_scales_of_tensors_or_of_numpy_s_numbers_are_torchs(mapping: Any) -> None:
    extract, inputs = NormalParamExtractor(), torch.randn(5, 6)
    extract.scale_mapping = mapping()
    _, expected = extract(inputs)
    layers_in_numpy(extract)
    with torch.inference_mode():
        assert torch.equal(extract(inputs)[1], expected)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("num_actions", [1, 3, 6, 17])
def test_a_row_s_scale_does_not_depend_on_where_it_stands(mapping: str, num_actions: int) -> None:
    """Torch rounds what its vector instructions compute otherwise than what is left over."""
    torch.manual_seed(0)
    inputs = torch.randn(40, 2 * num_actions)
    extract = NormalParamExtractor(mapping)
    layers_in_numpy(extract)
    with torch.inference_mode():
        _, whole = extract(inputs)
        for first, last in ((0, 1), (0, 5), (3, 7), (11, 40), (39, 40)):
            assert torch.equal(extract(inputs[first:last])[1], whole[first:last])


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("num_actions", [1, 3, 8])
def test_a_scale_that_rows_share_has_the_same_bits_in_all(mapping: str, num_actions: int) -> None:
    """Whatever is learned: calibration sees a few values of it alone."""
    torch.manual_seed(0)
    add = AddStateIndependentNormalScale(num_actions, scale_mapping=mapping)
    inside = nn.Sequential(add)
    for _ in range(20):
        with torch.no_grad():
            add.state_independent_scale.normal_()
        add.__class__ = AddStateIndependentNormalScale
        _, expected = add(torch.zeros(40, num_actions))
        layers_in_numpy(inside)
        assert (type(add) is OneScale) == (mapping != "relu")
        with torch.inference_mode():
            (_, alone), (loc, scale) = (inside(torch.zeros(m, num_actions)) for m in (1, 40))
        assert torch.equal(scale, alone.expand(40, -1))
        torch.testing.assert_close(scale, expected)
        assert loc.shape == (40, num_actions)


def test_a_scale_is_refused_for_another_number_of_actions() -> None:
    add = AddStateIndependentNormalScale(3)
    layers_in_numpy(add)
    with pytest.raises(RuntimeError, match="do not match"):
        add(torch.zeros(8, 2))


def test_columns_and_what_is_not_finite_are_taken() -> None:
    inputs = torch.tensor([[0.0, torch.inf, -torch.inf], [torch.nan, -50.0, 50.0]]).T
    expected = torch.tensor([[0.0, torch.nan], [1.0, -1.0], [-1.0, 1.0]])
    torch.testing.assert_close(NumpyTanh()(inputs), expected, equal_nan=True)


def test_what_needs_gradients_is_mapped_or_nested_is_left_to_torch() -> None:
    inputs = torch.randn(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(NumpyTanh()(inputs).sum(), inputs)
    torch.testing.assert_close(gradient, 1 - torch.tanh(inputs) ** 2)
    mapped = torch.vmap(NumpyTanh())(inputs.detach())
    torch.testing.assert_close(mapped, torch.tanh(inputs.detach()))
    with forward_ad.dual_level():
        moved = forward_ad.make_dual(inputs.detach(), torch.ones(4, 3))
        tangent = forward_ad.unpack_dual(NumpyTanh()(moved)).tangent
    torch.testing.assert_close(tangent, gradient)
    nested = torch.nested.nested_tensor([torch.randn(2, 7), torch.randn(3, 7)])
    expected = torch.tanh(nested).to_padded_tensor(0.0)
    torch.testing.assert_close(NumpyTanh()(nested).to_padded_tensor(0.0), expected)


def test_tensors_of_special_kinds_are_left_to_torch() -> None:
    class Own(Tensor):
        """A tensor that may do anything."""

    with torch.inference_mode():
        output = NumpyTanh()(torch.randn(3).as_subclass(Own))
    assert type(output) is Own
    negated = torch.randn(3, dtype=torch.complex64).conj().imag
    torch.testing.assert_close(NumpyTanh()(negated), torch.tanh(negated))


def test_every_plain_layer_becomes_one_with_its_hooks_and_no_other() -> None:
    class Own(nn.Tanh):
        """A layer that may do anything."""

    seen: list[Tensor] = []
    plain = nn.Tanh()
    plain.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    net = nn.Sequential(nn.Linear(2, 2), plain, nn.Sequential(Own(), plain))
    layers_in_numpy(net)
    kinds = [type(layer) for layer in deepcopy(net).modules() if isinstance(layer, nn.Tanh)]
    assert kinds == [NumpyTanh, Own]
    with torch.inference_mode():
        net(torch.zeros(1, 2))
    assert len(seen) == 2
