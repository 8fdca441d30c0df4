"""Large layers with weights in the kernels' order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from probe import use_kernel
from torch import Tensor, nn
from torch.nn.utils import prune

from torchrl_hts._policy.packed_layers import PackedLayers

Conv = partial(nn.Conv2d, 4, 8)


def as_it_is(input: Tensor) -> Tensor:
    return input


def channels_last(input: Tensor) -> Tensor:
    return input.contiguous(memory_format=torch.channels_last)


def expanded(input: Tensor) -> Tensor:
    return input[:1].expand_as(input)


def sliced(input: Tensor) -> Tensor:
    return torch.cat([input, input], -1)[..., : input.shape[-1]]


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (partial(Conv, 3), (3, 4, 9, 11)),
    (partial(Conv, 3, bias=False, groups=4), (3, 4, 9, 11)),
    (partial(Conv, (2, 3), stride=(1, 2), padding=1, dilation=2), (1, 4, 9, 11)),
    (partial(Conv, 1), (3, 4, 1, 1)),
    (partial(nn.Linear, 1024, 512), (5, 1024)),
    (partial(nn.Linear, 1024, 512, bias=False), (1, 1024)),
]


@pytest.mark.parametrize(("make", "shape"), LAYERS)
@pytest.mark.parametrize("arrange", [as_it_is, channels_last, expanded, sliced])
def test_a_packed_layer_is_the_layer(
    make: Callable[[], nn.Module], shape: tuple[int, ...], arrange: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    if arrange is channels_last and len(shape) != 4:
        arrange = as_it_is
    layer, inputs = make(), arrange(torch.randn(shape))
    layers = PackedLayers(layer, rows=8)
    assert len(layers) == 1
    with torch.inference_mode():
        expected = layer(inputs)
        for _ in range(2):
            layers.pack()
            torch.testing.assert_close(layer(inputs), expected, rtol=1e-4, atol=1e-5)
        layers.unpack()
        assert torch.equal(layer(inputs), expected)
    assert "forward" not in vars(layer)


def test_weights_are_those_of_the_last_packing() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Conv(3), nn.Flatten(), nn.Linear(8 * 7 * 9, 1300))
    layers, inputs = PackedLayers(net, rows=8), torch.randn(5, 4, 9, 11)
    assert len(layers) == 2
    layers.pack()
    with torch.inference_mode():
        first = net(inputs)
        for parameter in net.parameters():
            parameter *= 2
        layers.pack()
        second = net(inputs)
        layers.unpack()
        torch.testing.assert_close(second, net(inputs), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(first, second, rtol=1e-2)


def test_a_functional_calls_parameters_are_used() -> None:
    layer, inputs = nn.Linear(1024, 512), torch.randn(5, 1024)
    other = {"weight": torch.zeros(512, 1024), "bias": torch.ones(512)}
    PackedLayers(layer, rows=8).pack()
    with torch.inference_mode():
        layer(inputs)
        assert (torch.func.functional_call(layer, other, (inputs,)) == 1).all()


@pytest.mark.parametrize("shape", [(1024,), (0, 1024), (2, 3, 1024)])
def test_inputs_of_other_shapes_are_the_layers_own(shape: tuple[int, ...]) -> None:
    layer, inputs = nn.Linear(1024, 512), torch.randn(shape)
    PackedLayers(layer, rows=8).pack()
    with torch.inference_mode():
        assert torch.equal(layer(inputs), nn.Linear.forward(layer, inputs))


def test_other_layers_are_left_alone() -> None:
    class Own(nn.Linear):
        """A layer that may do anything."""

    patched = nn.Linear(1024, 512)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    others = [
        nn.Linear(512, 512),
        Own(1024, 512),
        nn.Linear(1024, 512, dtype=torch.float64),
        prune.l1_unstructured(nn.Linear(1024, 512), "weight", amount=0.5),
        patched,
        Conv(3, padding="same"),
        Conv(3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(4, 8, 3),
    ]
    for layer in others:
        assert not len(PackedLayers(layer, rows=8)), layer
    assert not len(PackedLayers(nn.Linear(1024, 512), rows=7))


@pytest.mark.parametrize("wrong", [lambda y: y + 0.1, lambda y: y.double()])
def test_kernels_that_compute_something_else_are_found_at_the_first_call(
    wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(layer: Any, rows: int) -> Any:
        return lambda weight, shape: weight, lambda x, weight: wrong(
            nn.functional.linear(x, weight)
        )

    use_kernel(monkeypatch, kernel)
    layer = nn.Linear(4, 3, bias=False)
    PackedLayers(layer, rows=8).pack()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="something else with packed"):
        layer(torch.randn(5, 4))


def test_a_layer_that_is_nan_passes_it_on() -> None:
    """Who reads the outputs tells of it."""
    layer, inputs = Conv(3), torch.randn(2, 4, 9, 9)
    with torch.inference_mode():
        layer.weight[1, 1, 1, 1] = torch.nan
        PackedLayers(layer, rows=8).pack()
        assert layer(inputs)[:, 1].isnan().all()
        torch.testing.assert_close(layer(inputs), nn.Conv2d.forward(layer, inputs), equal_nan=True)


def test_what_runs_under_a_pre_hook_is_left_alone() -> None:
    """It may change weights after they were packed."""

    def halve(module: nn.Module, inputs: Any) -> None:
        module.get_parameter("0.weight").data.mul_(0.5)

    inner = nn.Sequential(Conv(3), nn.ReLU())
    net = nn.Sequential(inner, nn.Conv2d(8, 8, 3), nn.Sequential(inner[0]))
    inner.register_forward_pre_hook(halve)
    assert len(PackedLayers(net, rows=8)) == 1


def test_autocast_and_vmap_get_the_layer_itself() -> None:
    layer, inputs = Conv(3), torch.randn(2, 4, 9, 9)
    PackedLayers(layer, rows=8).pack()
    with torch.inference_mode():
        layer(inputs)
        with torch.autocast("cpu"):
            assert layer(inputs).dtype == torch.bfloat16
        rows = torch.vmap(layer)(inputs)
    torch.testing.assert_close(rows, layer(inputs), rtol=1e-4, atol=1e-5)
