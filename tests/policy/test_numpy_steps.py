"""Small dense policies in numpy: which they are, and that they compute what torch does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampled_policies import OBS, RANDOM, M, make_actor, make_batch
from tensordict import TensorDict
from tensordict.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as D
from torchrl.envs.utils import ExplorationType
from torchrl.modules import MLP, IndependentNormal, TanhNormal, ValueOperator

from torchrl_hts import RunningNorm
from torchrl_hts._policy.counter_policy import CounterPolicy, inference
from torchrl_hts._policy.draws import CounterNoise, uniforms_of
from torchrl_hts._policy.numpy_layers import layers_in_numpy

pytestmark = pytest.mark.usefixtures("seeded_thread")


def prepare(net: nn.Module, kind: ExplorationType = RANDOM) -> tuple[CounterPolicy, TensorDict]:
    policy = CounterPolicy(make_actor(D.Categorical, ["logits"], net), kind)
    td = make_batch(policy.policy)
    policy.prepare(td)
    return policy, td


def words_of(policy: CounterPolicy, round_: int = 0) -> Any:
    return CounterNoise(1, M, 1, policy.width).round(round_)[:, 0]


DENSE = {
    "one layer": lambda: nn.Linear(OBS, 4),
    "tanh": lambda: nn.Sequential(nn.Linear(OBS, 64), nn.Tanh(), nn.Linear(64, 4)),
    "relu": lambda: nn.Sequential(nn.Linear(OBS, 64), nn.ReLU(inplace=True), nn.Linear(64, 4)),
    "a layer twice": lambda: nn.Sequential(*[nn.Linear(OBS, OBS)] * 2, nn.Linear(OBS, 4)),
    "no bias": lambda: nn.Sequential(nn.Linear(OBS, 4, bias=False), nn.Tanh()),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(OBS, OBS), nn.Tanh()), MLP(OBS, 4)),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_layers_compute_what_torch_does(name: str) -> None:
    net = DENSE[name]()
    policy, td = prepare(net)
    assert policy.takes_arrays
    observation = td["observation"].clone()
    out = policy(td, words_of(policy))
    with torch.inference_mode():
        torch.testing.assert_close(out["logits"], net(observation))
        expected = D.Categorical(logits=net(observation)).log_prob(out["action"])
    torch.testing.assert_close(out["action_log_prob"], expected)
    assert torch.equal(td["observation"], observation), "layers leave their input alone"


def test_parameters_are_read_where_they_lie() -> None:
    """An actor's lie in a slot, which is written to between rounds."""
    net = DENSE["tanh"]()
    policy, td = prepare(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
        expected = net(td["observation"])
    torch.testing.assert_close(policy(td, words_of(policy))["logits"], expected)


def test_a_critic_beside_the_actor_is_run_as_well() -> None:
    trunk = TensorDictModule(nn.Sequential(nn.Linear(OBS, 16), nn.Tanh()), ["observation"], ["h"])
    actor = make_actor(D.Categorical, ["logits"], nn.Linear(OBS, 3))
    critic = ValueOperator(nn.Linear(16, 1), ["h"])
    policy = CounterPolicy(TensorDictSequential(trunk, actor, critic), RANDOM)
    td = make_batch(policy.policy)
    policy.prepare(td)
    assert policy.takes_arrays
    out = policy(td.copy(), words_of(policy))
    with torch.inference_mode():
        expected = critic(trunk(td.copy()))["state_value"]
    torch.testing.assert_close(out["state_value"], expected)


CONTINUOUS = {
    "scale of its own": (IndependentNormal, lambda: AddStateIndependentNormalScale(4), {}),
    "scale by the network": (
        TanhNormal, NormalParamExtractor, {"low": -2 * torch.ones(2), "high": torch.ones(2)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_actions_are_drawn_in_numpy_too(name: str) -> None:
    kind, extract, kwargs = CONTINUOUS[name]
    net = nn.Sequential(nn.Linear(OBS, 16), nn.Tanh(), nn.Linear(16, 4), extract())
    actor = make_actor(kind, ["loc", "scale"], net, distribution_kwargs=kwargs)
    policy = CounterPolicy(actor, RANDOM)
    td = make_batch(actor)
    policy.prepare(td)
    assert policy.takes_arrays
    with torch.no_grad():  # they are read where they lie
        for parameter in net.parameters():
            parameter.add_(0.3)
    seen: list[Tensor] = []
    with policy.watched(lambda tensor: seen.append(tensor.clone())):
        out = policy(td.copy(), words_of(policy))
    with torch.inference_mode():
        loc, scale = net(td["observation"])
    for got, expected in ((out["loc"], loc), (seen[-2], loc), (out["scale"], scale)):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(seen[-1], scale)
    value = loc + scale * torch.special.ndtri(torch.from_numpy(uniforms_of(words_of(policy))))
    if kwargs:
        value = value.tanh() * 1.5 - 0.5
    torch.testing.assert_close(out["action"], value.float())


def _hooked_mapping() -> NormalParamExtractor:
    extract = NormalParamExtractor()
    extract.scale_mapping.register_forward_hook(lambda mapping, inputs, output: 2 * output)
    return extract


EXTRACTORS = {
    "a tensor as the least scale": lambda: NormalParamExtractor(scale_lb=torch.tensor(0.9)),
    "a parameter": lambda: NormalParamExtractor(scale_lb=nn.Parameter(torch.tensor(0.9))),
    "numpy's number": lambda: NormalParamExtractor(scale_lb=np.float64(0.9)),
    "an integer": lambda: NormalParamExtractor(scale_lb=1),
    "a hook": _hooked_mapping,
}


@pytest.mark.parametrize("name", EXTRACTORS)
def test_scales_are_those_of_the_module(name: str) -> None:
    net = nn.Sequential(nn.Linear(OBS, 4), EXTRACTORS[name]())
    actor = make_actor(IndependentNormal, ["loc", "scale"], net)
    td = make_batch(actor)
    with torch.no_grad():
        _, expected = net(td["observation"])
    layers_in_numpy(actor)
    policy = CounterPolicy(actor, RANDOM)
    policy.prepare(td)
    assert policy.takes_arrays
    out = policy(td.copy(), words_of(policy))
    torch.testing.assert_close(out["scale"], expected)
    assert out["action"].dtype == torch.float32


def test_observations_that_numpy_has_no_data_type_for_are_torchs() -> None:
    net = nn.Sequential(RunningNorm(OBS), nn.Linear(OBS, 4))
    policy = CounterPolicy(make_actor(D.Categorical, ["logits"], net), RANDOM)
    td = TensorDict({"observation": torch.randn(M, OBS, dtype=torch.bfloat16)}, [M])
    policy.prepare(td)
    with torch.inference_mode():
        assert torch.equal(policy(td.copy(), words_of(policy))["logits"], net(td["observation"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_running_statistics_may_come_first(dtype: torch.dtype) -> None:
    """With the bits of the layer, as they are now; of observations of any data type."""
    norm = RunningNorm(OBS, clip=1.0)
    policy = CounterPolicy(
        make_actor(D.Categorical, ["logits"], nn.Sequential(norm, DENSE["tanh"]())), RANDOM
    )
    td = TensorDict({"observation": (50 * torch.rand(M, OBS)).to(dtype)}, [M])
    policy.prepare(td)
    assert policy.takes_arrays
    norm.update(TensorDict({"observation": (30 * torch.rand(4, 9, OBS)).to(dtype)}, [4, 9]))
    seen: list[Tensor] = []
    with policy.watched(lambda tensor: seen.append(tensor.clone())):
        policy(td.copy(), words_of(policy))
    assert torch.equal(seen[0], norm(td["observation"]))
    with torch.inference_mode():
        expected = policy.policy(td.copy())["logits"]
    torch.testing.assert_close(policy(td.copy(), words_of(policy))["logits"], expected)
    assert seen[0].dtype == torch.float32
    assert (seen[0].abs() == 1).any(), "some are clipped"


def test_two_draws_are_torchs_each_from_numbers_of_its_own() -> None:
    first = make_actor(D.Categorical, ["logits"], nn.Linear(OBS, 30))
    second = make_actor(D.Categorical, ["logits"], nn.Linear(OBS, 30), out_keys=["other"])
    second[0].module.load_state_dict(first[0].module.state_dict())
    policy = CounterPolicy(TensorDictSequential(first, second), RANDOM)
    td = make_batch(policy.policy)
    policy.prepare(td)
    assert (policy.width, policy.takes_arrays) == (2, False)
    out = policy(td.copy(), words_of(policy))
    assert (out["action"] != out["other"]).any()


def test_parameters_that_numpy_is_not_made_for_are_drawn_by_torch() -> None:
    """Here one scale for all actions of a row, which torch expands."""
    loc = TensorDictModule(nn.Linear(OBS, 3), ["observation"], ["loc"])
    scale = TensorDictModule(
        nn.Sequential(nn.Linear(OBS, 1), nn.ReLU()), ["observation"], ["scale"]
    )
    actor = make_actor(IndependentNormal, ["loc", "scale"], nn.Identity())[-1]
    policy = CounterPolicy(TensorDictSequential(loc, scale, actor), RANDOM)
    td = make_batch(policy.policy)
    policy.prepare(td)
    assert policy.takes_arrays
    out = policy(td.copy(), words_of(policy))
    normal = torch.special.ndtri(torch.from_numpy(uniforms_of(words_of(policy)))).float()
    with torch.inference_mode():
        expected = loc(td)["loc"] + normal * scale(td)["scale"]
    torch.testing.assert_close(out["action"], expected)
    assert out["action_log_prob"].shape == (M,)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(OBS, 4))
    net[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return net


OTHERS = {
    "no weights": lambda: nn.Tanh(),
    "statistics alone": lambda: RunningNorm(OBS),
    "an activation first, which may overwrite what others read": lambda: nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(OBS, 4)
    ),
    "another activation": lambda: nn.Sequential(nn.Linear(OBS, 4), nn.SiLU()),
    "a layer of its own": lambda: Doubled(OBS, 4),
    "a parametrized layer": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(OBS, 4)),
    "a hook": _hooked,
    "many weights": lambda: nn.Sequential(nn.Linear(OBS, 40_000), nn.Linear(40_000, 4)),
    "statistics of more dimensions": lambda: nn.Sequential(
        nn.Linear(OBS, OBS), RunningNorm((M, OBS)), nn.Linear(OBS, 4)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(-1, (1, OBS)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(2 * OBS - 4, 4)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_torchs(name: str) -> None:
    net = OTHERS[name]()
    policy, td = prepare(net)
    assert not policy.takes_arrays
    with torch.inference_mode():
        expected = net(td["observation"].clone())
    assert torch.equal(policy(td, words_of(policy))["logits"], expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_integers_that_numpy_would_give_another_data_type_are_torchs(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Tanh(), nn.Linear(1, 1))  # in torch float32, in numpy float16 and 64
    policy = CounterPolicy(TensorDictModule(net, ["observation"], ["action"]), RANDOM)
    td = TensorDict({"observation": torch.arange(M, dtype=dtype)[:, None]}, [M])
    policy.prepare(td)
    assert not policy.takes_arrays
    with torch.inference_mode():
        expected = net(td["observation"])
    assert torch.equal(policy(td, np.zeros((M, 0), np.uint64))["action"], expected)


def test_observations_of_more_dimensions_are_torchs() -> None:
    """Numpy has no matrix product of them, but one product for each number."""
    policy = CounterPolicy(make_actor(D.Categorical, ["logits"], DENSE["tanh"]()), RANDOM)
    td = TensorDict({"observation": torch.randn(M, 3, OBS)}, [M])
    policy.prepare(td)
    assert not policy.takes_arrays
    assert policy(td, words_of(policy))["action"].shape == (M, 3)


def test_numbers_of_64_bits_stay_so() -> None:
    net = DENSE["tanh"]().double()
    policy = CounterPolicy(make_actor(D.Categorical, ["logits"], net), RANDOM)
    td = TensorDict({"observation": torch.randn(M, OBS, dtype=torch.float64)}, [M])
    policy.prepare(td)
    assert policy.takes_arrays
    out = policy(td, words_of(policy))
    with torch.inference_mode():
        torch.testing.assert_close(out["logits"], net(td["observation"]))
    assert out["action_log_prob"].dtype == torch.float64


@pytest.mark.parametrize("name", ["tanh", "another activation"])
def test_what_each_layer_passes_on_can_be_watched(name: str) -> None:
    """The calibration compares it; watching changes no bit."""
    net = (DENSE | OTHERS)[name]()
    policy, td = prepare(net)
    before = policy(td.copy(), words_of(policy))
    seen: list[Tensor] = []
    with policy.watched(lambda tensor: seen.append(tensor.clone())):
        during = policy(td.copy(), words_of(policy))
    layers = list(net)
    assert len(seen) == len(layers)
    value = td["observation"]
    with torch.inference_mode():
        for layer, passed_on in zip(layers, seen, strict=True):
            value = layer(value)
            torch.testing.assert_close(passed_on, value)
    after = policy(td.copy(), words_of(policy))
    assert len(seen) == len(layers)
    for out in (during, after):
        assert all(torch.equal(out[key], value) for key, value in before.items())


def test_layers_inside_vmap_are_not_watched() -> None:
    """Their tensors must not get out of it."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3)

        def forward(self, value: Tensor) -> Tensor:
            return torch.vmap(self.net)(value.unflatten(-1, (2, -1))).flatten(-2)

    policy, td = prepare(nn.Sequential(nn.Linear(6, 8), Heads()))
    before = policy(td.copy(), words_of(policy))
    seen: list[Tensor] = []
    with policy.watched(lambda tensor: seen.append(tensor.clone())):
        during = policy(td.copy(), words_of(policy))
    assert [value.shape for value in seen] == [(len(td), 8)]
    assert torch.equal(during["logits"], before["logits"])


@pytest.mark.parametrize("bias", [True, False])
def test_in_blocks_rows_have_the_bits_of_a_batch_of_eight(bias: bool) -> None:
    """And of several blocks beside each other, wherever they stand."""
    wide = nn.Linear(64, 64, bias=bias)
    policy, _ = prepare(nn.Sequential(nn.Linear(OBS, 64), nn.Tanh(), wide, nn.Linear(64, 4)))
    policy.block(True)
    rows = torch.randn(40, OBS)
    noise = policy.noise_of(CounterNoise(1, 40, 1, policy.width).round(0)[:, 0])

    def run(order: Any) -> Any:
        values = {"observation": rows[order].numpy()}
        with inference(RANDOM):
            return policy.run(values, noise[order])["logits"]

    alone = np.concatenate([run(np.arange(first, first + 8)) for first in range(0, 40, 8)])
    np.testing.assert_array_equal(run(np.arange(40)), alone)
    order = np.random.default_rng(0).permutation(40).reshape(5, 8)[::2].ravel()
    swapped = order.reshape(3, 8)[::-1].ravel()  # each row keeps its place within a block
    np.testing.assert_array_equal(run(swapped), run(order).reshape(3, 8, -1)[::-1].reshape(24, -1))
    assert run(np.arange(5)).shape == (5, 4)
    assert run(np.arange(12)).shape == (12, 4)
    policy.block(False)
    np.testing.assert_array_equal(run(np.arange(8)), alone[:8])


def test_run_takes_and_returns_arrays() -> None:
    policy, td = prepare(DENSE["tanh"]())
    words = words_of(policy)
    expected = policy(td.copy(), words)
    with inference(RANDOM):
        got = policy.run({"observation": td["observation"].numpy()}, policy.noise_of(words))
    for key in ("action", "action_log_prob"):
        value = got[key]
        assert isinstance(value, np.ndarray)
        assert torch.equal(torch.from_numpy(value), expected[key])
