"""Lazy parameters get their values where the collector is made, as in TorchRL's collectors."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from collectors import one_batch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import MLP, GRUModule, QValueModule

pytestmark = pytest.mark.usefixtures("nothing_left")

SINGLE = partial(GymEnv, "CartPole-v1")


def deep_q() -> Seq:
    """As in TorchRL's tutorials: what is observed is not said."""
    torch.manual_seed(0)
    values = Mod(MLP(out_features=2, num_cells=[8]), ["observation"], ["action_value"])
    return Seq(values, QValueModule(spec=SINGLE().action_spec))


@pytest.mark.parametrize(
    "env", [SINGLE(), SINGLE, [SINGLE] * 2, SerialEnv(2, SINGLE), partial(SerialEnv, 2, SINGLE)]
)
def test_values_are_those_that_a_first_pass_gives(env: Any) -> None:
    policy = deep_q()
    optimizer = torch.optim.Adam(policy.parameters())  # may be made before
    assert one_batch(env, policy)["action_value"].shape[-1] == 2
    after = torch.get_rng_state()
    other = deep_q()
    other(SINGLE().fake_tensordict())
    assert torch.equal(after, torch.get_rng_state()), "nothing else was drawn"
    for own, theirs in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(own, theirs)
    assert optimizer.param_groups[0]["params"] == list(policy.parameters())


def narrow() -> gym.Env[Any, Any]:
    return gym.wrappers.DtypeObservation(gym.make("CartPole-v1"), "float32")


class Both(gym.ObservationWrapper[Any, Any, Any]):
    """Observed by two names."""

    def __init__(self) -> None:
        super().__init__(narrow())
        box = self.env.observation_space
        self.observation_space = gym.spaces.Dict(here=box, there=gym.spaces.Dict(again=box))

    def observation(self, observation: Any) -> Any:
        return {"here": observation, "there": {"again": observation}}


@pytest.mark.parametrize(
    ("env", "key", "shape"),
    [
        (narrow, "observation", (12,)),
        ([partial(gym.make_vec, "CartPole-v1", 2, "sync")], "observation", (2, 6)),
        (Both, "here", (12,)),
        (Both, ("there", "again"), (12,)),
    ],
)
def test_environments_of_gymnasium(env: Any, key: Any, shape: tuple[int, ...]) -> None:
    policy = Mod(nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d().eval()), [key], ["action"])
    batch = one_batch(env, policy)
    assert batch.shape == shape
    assert policy.module[0].in_features == 4
    assert policy.training


class Timed(nn.Module):
    """Reads the steps that are counted, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(1)
        self.norm = nn.LazyBatchNorm1d(affine=False).eval()

    def forward(self, seen: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return self.norm(self.net(seen)) + 0 * steps


@pytest.mark.parametrize("make", [partial(GymEnv, "Pendulum-v1"), partial(gym.make, "Pendulum-v1")])
def test_steps_that_are_counted_are_there(make: Any) -> None:
    policy = Mod(Timed(), ["observation", "step_count"], ["action"])
    assert one_batch(make, policy, max_frames_per_traj=5)["step_count"].max() == 4


def test_what_recurrent_policies_need_is_there() -> None:
    gru = GRUModule(4, 8, in_keys=["observation", "h", "is_init"], out_keys=["f", ("next", "h")])
    policy = Seq(gru, Mod(nn.LazyLinear(2), ["f"], ["action"]))
    batch = one_batch(SINGLE, policy, auto_register_policy_transforms=True)
    assert batch["h"].shape == (12, 1, 8)


def test_init_fn_is_called_in_executors_alone() -> None:
    main = os.getpid()

    def begin() -> None:
        assert os.getpid() != main

    one_batch(SINGLE, deep_q(), init_fn=begin)
