"""Policies of every kind that draw from a counter, and what they draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Bounded, TensorSpec
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs.utils import ExplorationType
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    AdditiveGaussianModule,
    EGreedyModule,
    LSTMModule,
    ProbabilisticActor,
    QValueActor,
    ValueOperator,
)
from torchrl.modules import distributions as rl_dist

from torchrl_hts._policy.counter_policy import CounterPolicy
from torchrl_hts._policy.draws import CounterNoise
from torchrl_hts._policy.row_bits import row_bits

RANDOM = ExplorationType.RANDOM
M = 8  # rows of a batch
OBS = 6


def make_net(out: int, extract: bool = False) -> nn.Module:
    net = MLP(in_features=OBS, out_features=out, num_cells=[16, 16])
    return nn.Sequential(net, NormalParamExtractor()) if extract else net


def make_actor(kind: Any, keys: list[str], net: nn.Module, **kwargs: Any) -> ProbabilisticActor:
    module = TensorDictModule(net, ["observation"], keys)
    return ProbabilisticActor(
        module, in_keys=keys, distribution_class=kind, return_log_prob=True, **kwargs
    )


class _Split(nn.Module):
    """Parameters of three nested distributions, under the names that they are read by."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net(8)

    def forward(self, observation: Tensor) -> TensorDict:
        out = self.net(observation)
        params = {
            "move": {"logits": out[..., :3]},
            "aim": {"loc": out[..., 3:5], "scale": out[..., 5:7].exp()},
            "other": {"concentration1": out[..., 7:].exp(), "concentration0": out[..., 7:].exp()},
        }
        return TensorDict(params, [len(out)])


def _composite(last: bool) -> ProbabilisticTensorDictSequential:
    kinds = {"move": D.Categorical, "aim": rl_dist.TanhNormal}
    if last:
        kinds["other"] = D.Beta
    return ProbabilisticActor(
        TensorDictModule(_Split(), ["observation"], ["params"]),
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": kinds},
        return_log_prob=True,
    )


def _plain_sequential() -> ProbabilisticTensorDictSequential:
    """tensordict's own modules, with nothing of TorchRL."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(make_net(4, True), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=D.Normal, return_log_prob=True
        ),
    )


def _actor_value(policy_only: bool) -> TensorDictModuleBase:
    operator = ActorValueOperator(
        TensorDictModule(make_net(16), ["observation"], ["hidden"]),
        ProbabilisticActor(
            TensorDictModule(nn.Linear(16, 3), ["hidden"], ["logits"]),
            in_keys=["logits"],
            distribution_class=D.Categorical,
            return_log_prob=True,
        ),
        ValueOperator(nn.Linear(16, 1), ["hidden"]),
    )
    return operator.get_policy_operator() if policy_only else operator


def _recurrent() -> TensorDictModuleBase:
    lstm = LSTMModule(OBS, 7, in_key="observation", out_key="hidden")
    head = TensorDictModule(nn.Linear(7, 3), ["hidden"], ["logits"])
    return ProbabilisticTensorDictSequential(
        lstm,
        head,
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=D.Categorical, return_log_prob=True
        ),
    )


def _agents() -> ProbabilisticTensorDictSequential:
    """Three agents per environment, under a nested key."""
    return ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(make_net(12), nn.Unflatten(-1, (3, 4))),
            ["observation"],
            [("agents", "logits")],
        ),
        in_keys=[("agents", "logits")],
        out_keys=[("agents", "action")],
        distribution_class=D.Categorical,
        return_log_prob=True,
    )


class _Noisy(nn.Module):
    """Draws from torch's global generator, on its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def _exploring(spec: TensorSpec) -> TensorDictModuleBase:
    """Greedy, but for a random action now and then, of a spec that may be masked."""
    actor = QValueActor(make_net(4), in_keys=["observation"], spec=CategoricalSpec(4))
    explore = EGreedyModule(spec=spec, eps_init=0.5, eps_end=0.5)
    return TensorDictSequential(actor, explore)


def _jittery() -> TensorDictModuleBase:
    net = TensorDictModule(make_net(2), ["observation"], ["action"])
    spec = Bounded(-torch.ones(2), torch.ones(2))
    return TensorDictSequential(net, AdditiveGaussianModule(spec=spec))


class _Positive(nn.Module):
    """Two positive parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net(4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.net(x).exp().chunk(2, -1)


LOC_SCALE = ["loc", "scale"]
_BETA = ["concentration1", "concentration0"]


def _noisy(**kwargs: Any) -> TensorDictModuleBase:
    return make_actor(D.Categorical, ["logits"], nn.Sequential(make_net(4), _Noisy()), **kwargs)


@dataclass(frozen=True)
class Case:
    make: Callable[[], TensorDictModuleBase]
    width: int
    row_by_row: bool = False
    in_steps: bool = True


CASES = {
    "categorical": Case(lambda: make_actor(D.Categorical, ["logits"], make_net(4)), 1),
    "one-hot": Case(lambda: make_actor(rl_dist.OneHotCategorical, ["logits"], make_net(4)), 1),
    "normal": Case(lambda: make_actor(rl_dist.IndependentNormal, LOC_SCALE, make_net(4, True)), 2),
    "tanh-normal": Case(lambda: make_actor(rl_dist.TanhNormal, LOC_SCALE, make_net(4, True)), 2),
    "truncated": Case(lambda: make_actor(rl_dist.TruncatedNormal, LOC_SCALE, make_net(4, True)), 2),
    "deterministic": Case(lambda: TensorDictModule(make_net(2), ["observation"], ["action"]), 0),
    "tensordict": Case(_plain_sequential, 2),
    "actor and value": Case(lambda: _actor_value(False), 1),
    "policy operator": Case(lambda: _actor_value(True), 1),
    "nested agents": Case(_agents, 3),
    "own generator": Case(
        lambda: make_actor(D.Categorical, ["logits"], make_net(4), generator=3), 1
    ),
    "composite": Case(lambda: _composite(False), 3, in_steps=False),
    "composite, with another": Case(lambda: _composite(True), 1, in_steps=False),
    "recurrent": Case(_recurrent, 1, in_steps=False),
    "beta": Case(lambda: make_actor(D.Beta, _BETA, _Positive()), 1, in_steps=False),
    "noisy": Case(_noisy, 1, row_by_row=True, in_steps=False),
    "noisy, own generator": Case(lambda: _noisy(generator=3), 1, row_by_row=True, in_steps=False),
    "epsilon-greedy": Case(lambda: _exploring(CategoricalSpec(4)), 2, in_steps=False),
    "epsilon-greedy, masked": Case(
        lambda: _exploring(CategoricalSpec(4, mask=torch.arange(4) > 0)), 1, True, False
    ),
    "noise added": Case(_jittery, 2, in_steps=False),
}


def make_batch(policy: TensorDictModuleBase) -> TensorDict:
    td = TensorDict({"observation": torch.randn(M, OBS)}, [M])
    if "is_init" in policy.in_keys:
        td["is_init"] = torch.arange(M).unsqueeze(-1) % 3 == 0
        td["recurrent_state_h"] = torch.randn(M, 1, 7)
        td["recurrent_state_c"] = torch.randn(M, 1, 7)
    return td


def prepared(case: Case) -> tuple[CounterPolicy, TensorDict, Any]:
    policy = CounterPolicy(case.make(), RANDOM)
    td = make_batch(policy.policy)
    policy.prepare(td)
    return policy, td, CounterNoise(1, M, 1, policy.width).round(0)[:, 0]


def bits_of(out: TensorDictBase) -> dict[Any, bytes]:
    return {key: row_bits([value]).tobytes() for key, value in out.items(True, True)}
