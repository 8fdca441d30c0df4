"""Policies as users of TorchRL bring them, which collect here as they do there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import EchoEnv
from policies import categorical
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType
from torchrl.modules import GRUModule, ProbabilisticActor

from torchrl_hts import Evaluator, HTSCollector, WorkerError
from torchrl_hts._policy.counter_policy import inference

pytestmark = pytest.mark.usefixtures("nothing_left", "seeded_thread")


CARTPOLE = partial(gym.make, "CartPole-v1")


def gathered(policy: nn.Module, make_env: Any = EchoEnv, n: int = 4, **options: Any) -> Any:
    with HTSCollector(
        [make_env] * n, policy, frames_per_batch=4 * n, total_frames=8 * n, seed=0, **options
    ) as collector:
        return torch.stack([batch.clone() for batch in collector])


def actor(net: nn.Module, key: Any = "observation") -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(net, [key], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
    )


@pytest.mark.parametrize("n", [2, 5, 8])
def test_recurrent_networks_of_several_layers(n: int) -> None:
    """Their states have a first axis of layers, which is not one of rows."""
    gru = GRUModule(4, 8, num_layers=2, in_keys=["observation", "memory"], out_keys=[
        "features", ("next", "memory")
    ])  # fmt: skip
    head = actor(nn.Linear(8, 2), "features")
    policy = TensorDictSequential(gru, *head)
    found = [
        gathered(policy, CARTPOLE, n=n, num_executors=count, num_actors=count) for count in (1, 2)
    ]
    assert (found[0] == found[1]).all()


class TwoEars(gym.Wrapper):  # type: ignore[type-arg]
    """Observes a dictionary in a dictionary."""

    def __init__(self) -> None:
        super().__init__(EchoEnv())
        space = self.env.observation_space
        self.observation_space = gym.spaces.Dict(
            {"ears": gym.spaces.Dict({"left": space, "right": space})}
        )

    def reset(self, **options: Any) -> Any:
        observation, info = self.env.reset(**options)
        return {"ears": {"left": observation, "right": -observation}}, info

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action)
        return {"ears": {"left": observation, "right": -observation}}, *rest


class Listens(nn.Module):
    """Reads a whole TensorDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, ears: TensorDictBase) -> Tensor:
        both = torch.cat([ears["left"], ears["right"]], -1)
        logits: Tensor = self.layer(torch.tanh(both.float()))
        return logits


def test_a_module_that_reads_a_whole_tensordict() -> None:
    gathered(actor(Listens(), "ears"), TwoEars)


class Counts(TensorDictModuleBase):
    """Adds to what it carries where it lies."""

    in_keys = ("observation", "count")
    out_keys = ("action", ("next", "count"))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        td["count"] += 1
        td["next", "count"] = td["count"].clone()
        td["action"] = td["count"].long().squeeze(-1) % 3
        return td

    def make_tensordict_primer(self) -> Any:
        from torchrl.data import Unbounded
        from torchrl.envs import TensorDictPrimer

        return TensorDictPrimer({"count": Unbounded((1,))})


def test_what_is_carried_may_be_changed_in_place() -> None:
    found = gathered(Counts())
    assert found["action"].flatten().unique().numel() > 1


class Sometimes(nn.Module):
    """Draws in a branch that is not taken at first."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("sigma", torch.zeros(()))
        self.draw = draw

    def forward(self, observation: Tensor) -> Tensor:
        logits: Tensor = self.layer(torch.tanh(observation.float()))
        return logits + self.draw(logits) if self.sigma > 0 else logits


def by_torch(logits: Tensor) -> Tensor:
    return torch.randn_like(logits)


def by_numpy(logits: Tensor) -> Tensor:
    return torch.as_tensor(np.random.rand(*logits.shape)).float()


@pytest.mark.parametrize("draw", [by_torch, by_numpy])
def test_draws_that_the_trial_did_not_show_are_told(draw: Any) -> None:
    policy = actor(Sometimes(draw))
    with HTSCollector(
        [EchoEnv] * 2, policy, frames_per_batch=8, total_frames=80, lag=0
    ) as collector:
        batches = iter(collector)
        next(batches)
        with torch.no_grad():
            policy.module[0].module.sigma.fill_(1.0)
        with pytest.raises(WorkerError, match="has drawn from a default generator"):
            list(batches)


def test_attention_runs_as_it_is_calibrated() -> None:
    """Torch has a fused path of other bits, which it leaves where layers are watched."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    rows, seen = torch.randn(5, 3, 8), []
    with inference(ExplorationType.RANDOM):
        alone = layer(rows)
        hook = layer.linear1.register_forward_hook(lambda *args: seen.append(args))
        watched = layer(rows)
        hook.remove()
        assert not torch.backends.mha.get_fastpath_enabled()
    assert len(seen) == 1
    assert torch.equal(alone, watched)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_layer_without_inputs() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.layer = nn.Linear(0, 3), nn.Linear(4, 3)

        def forward(self, observation: Tensor) -> Tensor:
            nothing = observation[..., :0].float()
            logits: Tensor = self.layer(torch.tanh(observation.float())) + self.none(nothing)
            return logits

    with pytest.warns(UserWarning, match="zero-element"):
        policy = actor(Empty())
    gathered(policy)


def test_a_generator_of_the_policys_own_does_not_go_on_between_evaluations() -> None:
    net = categorical().module[0]
    policy = ProbabilisticActor(
        net, ["logits"], distribution_class=torch.distributions.Categorical, generator=3
    )
    with Evaluator(
        EchoEnv, policy, num_episodes=2, exploration_type=ExplorationType.RANDOM
    ) as evaluator:
        for _ in range(2):
            evaluator.submit(0)
        first, second = evaluator.wait()
    assert first.returns == second.returns
