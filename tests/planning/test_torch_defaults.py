"""Actors act in float32, whatever the user's process is within, and in what a policy asks for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from collectors import collect
from environments import EchoEnv
from evaluating import PayingEnv, one
from policies import categorical
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor, TanhNormal

from torchrl_hts import HTSCollector

pytestmark = pytest.mark.usefixtures("nothing_left")

Within = Callable[[], AbstractContextManager[Any]]
autocast: Within = partial(torch.autocast, "cpu", torch.bfloat16)
WITHIN = [autocast, torch.inference_mode]


class Autocast(nn.Module):
    """A network that computes in bfloat16, and returns what it is told to."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, observation: Tensor) -> Any:
        with torch.autocast(observation.device.type, torch.bfloat16):
            out = self.net(observation.float())
        return (
            out.to(self.dtype) if isinstance(out, Tensor) else tuple(x.to(self.dtype) for x in out)
        )


def tanh_normal(dtype: torch.dtype | None = None) -> ProbabilisticActor:
    """A continuous policy for `PayingEnv`; by autocast of its own, if it is to return a type."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(2, 2), NormalParamExtractor())
    net = net if dtype is None else Autocast(net, dtype)
    module = TensorDictModule(net, ["observation"], ["loc", "scale"])
    return ProbabilisticActor(
        module, ["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True
    )


def discrete(dtype: torch.dtype) -> ProbabilisticActor:
    """A policy over three actions, by autocast of its own."""
    torch.manual_seed(0)
    module = TensorDictModule(Autocast(nn.Linear(4, 3), dtype), ["observation"], ["logits"])
    return ProbabilisticActor(
        module,
        ["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize(("env", "make"), [(EchoEnv, categorical), (PayingEnv, tanh_normal)])
def test_batches_are_the_same_within(within: Within, env: Any, make: Any) -> None:
    """Made there, and iterated elsewhere or there too."""
    policy = make()
    expected = collect([env] * 2, policy)
    for later in (nullcontext, within):
        with within():
            collector = HTSCollector(
                [env] * 2, policy, frames_per_batch=8, total_frames=24, seed=0, num_executors=1
            )
        with later(), collector:
            found = torch.cat(list(collector), dim=1)
        assert (found == expected).all()
        assert found["action_log_prob"].dtype == torch.float32


@pytest.mark.parametrize("within", WITHIN)
def test_evaluations_are_the_same_within(within: Within) -> None:
    policy = tanh_normal()
    expected = one(PayingEnv, policy, num_episodes=2)
    with within():
        assert one(PayingEnv, policy, num_episodes=2).returns == expected.returns


@pytest.mark.parametrize(
    ("env", "make", "dtype"),
    [
        (EchoEnv, discrete, torch.bfloat16),
        (EchoEnv, discrete, torch.float32),
        (PayingEnv, tanh_normal, torch.float32),
    ],
)
def test_autocast_of_the_policys_own(env: Any, make: Any, dtype: torch.dtype) -> None:
    policy = make(dtype)
    data = collect([env] * 2, policy)
    assert data["action_log_prob"].dtype == dtype
    with torch.no_grad():
        again = policy.get_dist(data.copy()).log_prob(data["action"])
    torch.testing.assert_close(again, data["action_log_prob"], atol=1e-4, rtol=1e-4)
