"""The way around TensorDict: taken where it keeps every bit, and nowhere else."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from probe import as_a_whole, takes_steps
from sampled_policies import (
    CASES,
    OBS,
    RANDOM,
    M,
    bits_of,
    make_actor,
    make_batch,
    make_net,
    prepared,
)
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as D
from torchrl.envs.utils import ExplorationType
from torchrl.modules import (
    MLP,
    ProbabilisticActor,
)

from torchrl_hts._policy.counter_policy import CounterPolicy
from torchrl_hts._policy.draws import CounterNoise
from torchrl_hts._policy.numpy_layers import layers_in_numpy

_DRAWN_IN_NUMPY = (
    "categorical", "actor and value", "policy operator", "own generator", "nested agents",
    "normal", "tanh-normal", "tensordict",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("seeded_thread")


def assert_rounded_otherwise(short: TensorDictBase, whole: TensorDictBase) -> None:
    """Numbers of floating point within a few of their last bits, all others equal."""
    assert short.keys() == whole.keys()
    for key, value in whole.items():
        torch.testing.assert_close(short[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.in_steps])
@pytest.mark.parametrize("kind", [RANDOM, ExplorationType.DETERMINISTIC])
def test_the_short_cut_keeps_every_bit(name: str, kind: ExplorationType) -> None:
    policy = CounterPolicy(CASES[name].make(), kind)
    td = make_batch(policy.policy)
    policy.prepare(td)
    assert takes_steps(policy)
    for round_ in range(5):
        words = CounterNoise(1, M, 1, policy.width).round(round_)[:, 0]
        td = make_batch(policy.policy)
        short = policy(td.copy(), words)
        with as_a_whole(policy):
            whole = policy(td.copy(), words)
        if policy.takes_arrays or (kind is RANDOM and name in _DRAWN_IN_NUMPY):
            assert_rounded_otherwise(short, whole)
        else:
            assert bits_of(short) == bits_of(whole)


def test_the_short_cut_does_not_hang_on_the_rounding_of_draws() -> None:
    """Which way is taken must not depend on the parameters, or a resumed run could take another."""
    policy, td, _ = prepared(CASES["categorical"])
    assert takes_steps(policy)
    differ = 0
    for round_ in range(20):
        out = policy(td.copy(), CounterNoise(1, M, 1, policy.width).round(round_)[:, 0])
        with torch.inference_mode():
            exact = policy.policy.get_dist(td).log_prob(out["action"])
        differ += int((out["action_log_prob"] != exact).sum())
    assert differ


def test_layers_of_plain_sequences_are_called_one_by_one() -> None:
    """Shared layers as often as they occur, layers with layers inside whole."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(OBS, OBS)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    shared = nn.Linear(OBS, OBS)
    net = nn.Sequential(shared, nn.Sequential(nn.Tanh(), Residual()), shared, MLP(OBS, 4))
    policy = CounterPolicy(make_actor(D.Categorical, ["logits"], net), RANDOM)
    td = make_batch(policy.policy)
    policy.prepare(td)
    assert takes_steps(policy)
    words = CounterNoise(1, M, 1, policy.width).round(0)[:, 0]
    called: list[str] = []
    with torch.inference_mode():
        assert torch.equal(policy(td.copy(), words)["logits"], net(td["observation"]))
    for name, module in net.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    assert torch.equal(policy(td.copy(), words)["logits"], net(td["observation"]).detach())
    assert len(called) == 2 * len(set(called)) + 2  # each, the shared one twice, in both calls


def test_tanh_overwrites_nothing_that_is_read_again() -> None:
    """Nor the observation, nor what an earlier module has written."""
    same = nn.Sequential(nn.Identity(), nn.Tanh(), nn.Linear(OBS, 5))
    hidden = TensorDictModule(same, ["observation"], ["h"])
    net = nn.Sequential(nn.Tanh(), nn.Linear(5, 8), nn.Tanh(), nn.SiLU(), nn.Linear(8, 4))
    actor = make_actor(D.Categorical, ["logits"], net)
    whole = TensorDictSequential(hidden, TensorDictModule(net, ["h"], ["logits"]), actor[-1])
    layers_in_numpy(whole)
    policy = CounterPolicy(whole, RANDOM)
    td = make_batch(whole)
    policy.prepare(td)
    assert takes_steps(policy)
    observation = td["observation"].clone()
    out = policy(td.copy(), CounterNoise(1, M, 1, policy.width).round(0)[:, 0])
    with torch.inference_mode():
        h = hidden(td.copy())["h"]
        assert torch.equal(out["h"], h)
        assert torch.equal(out["logits"], net(h))
    assert torch.equal(td["observation"], observation)


class _MasksInGetDist(ProbabilisticTensorDictModule):
    def get_dist(self, tensordict: TensorDictBase) -> D.Distribution:
        logits = tensordict["logits"].clone()
        logits[..., 0] = -torch.inf
        return D.Categorical(logits=logits)


class _AlwaysThree(ProbabilisticTensorDictModule):
    def _dist_sample(self, dist: D.Distribution, **kwargs: Any) -> Tensor:
        return torch.full_like(super()._dist_sample(dist, **kwargs), 3)


def _masks_in_an_attribute(*args: Any, **kwargs: Any) -> ProbabilisticTensorDictModule:
    module = ProbabilisticTensorDictModule(*args, **kwargs)
    module.__dict__["get_dist"] = partial(_MasksInGetDist.get_dist, module)
    return module


@pytest.mark.parametrize("make", [_MasksInGetDist, _AlwaysThree, _masks_in_an_attribute])
def test_what_a_module_does_its_own_way_is_kept(make: Any) -> None:
    draws = make(
        ["logits"], ["action"], distribution_class=D.Categorical, return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )  # fmt: skip
    net = TensorDictModule(nn.Linear(OBS, 4), ["observation"], ["logits"])
    policy = CounterPolicy(ProbabilisticTensorDictSequential(net, draws), RANDOM)
    td = make_batch(policy.policy)
    policy.prepare(td)
    actions = set()
    for round_ in range(20):
        out = policy(td.copy(), CounterNoise(1, M, 1, policy.width).round(round_)[:, 0])
        actions |= set(out["action"].tolist())
    assert actions == ({3} if make is _AlwaysThree else {1, 2, 3})


def test_hooks_of_a_policy_are_run() -> None:
    net = nn.Sequential(nn.Linear(OBS, 4))
    net[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    policy = CounterPolicy(make_actor(D.Categorical, ["logits"], net), RANDOM)
    td = make_batch(policy.policy)
    policy.prepare(td)
    words = CounterNoise(1, M, 1, policy.width).round(0)[:, 0]
    with torch.inference_mode():
        assert torch.equal(policy(td.copy(), words)["logits"], net(td["observation"]))


def test_the_short_cut_is_not_taken_where_it_would_change_a_bit() -> None:
    class Doubling(TensorDictModule):
        def _call_module(self, tensors: Any, **kwargs: Any) -> Any:
            return 2 * super()._call_module(tensors, **kwargs)

    class Naming(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"action": x + 1}

    for module in (Doubling(make_net(2), ["observation"], ["action"]),
                   TensorDictModule(Naming(), ["observation"], ["action"])):  # fmt: skip
        policy = CounterPolicy(module, RANDOM)
        td = make_batch(module)
        policy.prepare(td)
        assert not takes_steps(policy)
        with torch.inference_mode():
            stock = module(td.copy())
        assert bits_of(policy(td, np.zeros((M, 0), np.uint64))) == bits_of(stock)


def test_a_policy_with_selected_out_keys_takes_the_short_cut() -> None:
    """Its hook only leaves keys out; the bits are those of the whole policy."""
    torch.manual_seed(0)

    def policy() -> ProbabilisticActor:
        net = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
        return ProbabilisticActor(
            net, in_keys=["logits"], distribution_class=D.Categorical, return_log_prob=True
        )

    whole = policy()
    selected = policy().select_out_keys("action", "action_log_prob")
    selected.load_state_dict(whole.state_dict())
    td = TensorDict({"observation": torch.randn(5, 3)}, [5])
    words = np.arange(5, dtype=np.uint64)[:, None] << np.uint64(60)
    outputs = []
    for module in (whole, selected):
        counter = CounterPolicy(module, RANDOM)
        counter.prepare(td)
        assert takes_steps(counter)
        outputs.append(counter(td.copy(), words))
    assert "logits" not in outputs[1].keys()
    for key in ("action", "action_log_prob"):
        assert torch.equal(outputs[0][key], outputs[1][key])
