"""Advice on policies that can't be run in batches, and on what a run needs, followed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from advised import gather, refusal
from collectors import start
from environments import EchoEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.data import Categorical as CategoricalSpec
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor

from torchrl_hts import PolicyError

pytestmark = pytest.mark.usefixtures("warm_servers")


def acting(layer: nn.Module | Callable[[Tensor], Tensor]) -> Any:
    """A policy that draws by what a layer makes of the observation."""

    class Floats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = layer, nn.Linear(4, 3)

        def forward(self, observation: Tensor) -> Tensor:
            logits: Tensor = self.head(self.layer(torch.tanh(observation.float())))
            return logits

    return ProbabilisticActor(
        TensorDictModule(Floats(), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
    )


def refused(policy: Any) -> str:
    """Why it is, in any length: what is suspected is listed."""
    with pytest.raises(PolicyError) as caught:
        gather(EchoEnv, policy, copies=2)
    return str(caught.value)


def test_a_layer_that_drops_at_random() -> None:
    message = refused(acting(nn.Dropout(0.5)))
    assert "Call policy.eval() or set its p to 0" in message
    gather(EchoEnv, acting(nn.Dropout(0.5)).eval())
    gather(EchoEnv, acting(nn.Dropout(0.0)))


def test_functions_that_drop_at_random() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, training=self.training)

    message = refused(acting(nn.functional.dropout))
    assert "drops activations at random, by dropout: it would act with another network" in message
    assert "Let it do so where self.training is True alone, and call policy.eval()" in message
    assert refused(acting(Drops())) == message
    gather(EchoEnv, acting(Drops()).eval())


def test_statistics_of_a_batch() -> None:
    message = refused(acting(nn.BatchNorm1d(4)))
    assert "Put it in evaluation mode (policy.eval())" in message
    gather(EchoEnv, acting(nn.BatchNorm1d(4)).eval())
    message = refused(acting(nn.BatchNorm1d(4, track_running_stats=False)))
    assert "works row by row (LayerNorm, GroupNorm)" in message
    gather(EchoEnv, acting(nn.LayerNorm(4)))


def test_randomness_of_another_generator() -> None:
    class Noisy(nn.Module):
        def __init__(self, draw: Any) -> None:
            super().__init__()
            self.draw = draw

        def forward(self, x: Tensor) -> Tensor:
            return x + self.draw(x)

    def by_numpy(x: Tensor) -> Tensor:
        return torch.from_numpy(np.random.default_rng().random(x.shape, np.float32))

    assert "draw random numbers from torch's default generator" in refused(acting(Noisy(by_numpy)))
    gather(EchoEnv, acting(Noisy(torch.rand_like)))


class Remembers(TensorDictModuleBase):
    """Acts by how often it was called: by an attribute, or by what it wrote the step before."""

    in_keys, out_keys = ["observation"], ["action", "calls"]

    def __init__(self, in_attribute: bool) -> None:
        super().__init__()
        self.in_attribute, self.calls = in_attribute, 0

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if self.in_attribute:
            self.calls += 1
            calls = torch.full((*td.shape, 1), self.calls)
        else:
            calls = td.get("calls", torch.zeros(*td.shape, 1, dtype=torch.int64)) + 1
        td["calls"] = calls
        return td.set("action", (calls[..., 0] % 3))


def test_what_a_policy_remembers() -> None:
    with pytest.raises(PolicyError, match="Keep what it remembers in its inputs and outputs, and"):
        gather(EchoEnv, Remembers(in_attribute=True), copies=2)
    assert gather(EchoEnv, Remembers(in_attribute=False))["action"].tolist() == [[1, 2, 0, 1]]


class Endless(EnvBase):
    """Has no key for truncation, unless it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((4,)))
        self.action_spec, self.reward_spec = CategoricalSpec(3), Unbounded((1,))

    def _reset(self, tensordict: Any, **_: Any) -> Any:
        return self.observation_spec.zero()

    def _step(self, tensordict: Any) -> Any:
        done = torch.zeros(1, dtype=torch.bool)
        return self.observation_spec.zero().update({"reward": torch.ones(1), "done": done})

    def _set_seed(self, seed: int | None) -> None:
        pass


def test_a_key_for_truncation() -> None:
    assert "add one with env.add_truncated_keys()" in refusal(Endless, set_truncated=True)
    batch = gather(lambda: Endless().add_truncated_keys(), set_truncated=True)
    assert batch["next", "truncated"][:, -1].all()


def test_a_timeline(tmp_path: Any) -> None:
    collector = start([EchoEnv], num_executors=1, num_actors=1)
    with collector, pytest.raises(RuntimeError, match="make the collector with timeline_events="):
        collector.timeline(tmp_path / "it.json")
    recorded = start([EchoEnv], num_executors=1, num_actors=1, timeline_events=100_000)
    with recorded:
        next(iter(recorded))
        recorded.timeline(tmp_path / "it.json")
    assert (tmp_path / "it.json").stat().st_size


def test_factories_of_other_environments() -> None:
    """Those of one collector have to be alike."""
    from environments import DictEnv

    with pytest.raises(ValueError, match=r"must have equal spaces|have equal") as caught:
        start([EchoEnv, DictEnv], num_executors=1, num_actors=1)
    assert "environment 1 differs from environment 0" in str(caught.value)
    start([EchoEnv, partial(EchoEnv, (3,))], num_executors=1, num_actors=1).shutdown()
