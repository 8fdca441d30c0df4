"""Batches are laid out as TorchRL's own collector lays them out, with its values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from collectors import collect
from policies import categorical
from tensordict import TensorDict
from tensordict.nn import (
    TensorDictModule,
)
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    InitTracker,
    ObservationNorm,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl_environments import cartpole

from torchrl_hts import HTSCollector

pytestmark = pytest.mark.usefixtures("nothing_left")

CARTPOLE = partial(gym.make, "CartPole-v1")


def stock(env: Callable[[], Any], policy: nn.Module, **kwargs: Any) -> TensorDict:
    collector = Collector(
        SerialEnv(2, env), policy, frames_per_batch=8, total_frames=8, device="cpu", **kwargs
    )
    try:
        return next(iter(collector))
    finally:
        collector.shutdown()


def first_batch(envs: list[Any], policy: nn.Module, **kwargs: Any) -> TensorDict:
    with HTSCollector(envs, policy, frames_per_batch=8, **kwargs) as collector:
        return next(iter(collector))


def transformed() -> Any:
    return TransformedEnv(
        cartpole(),
        Compose(
            RewardSum(),
            StepCounter(),
            InitTracker(),
            ObservationNorm(loc=1.0, scale=2.0, in_keys=["observation"]),
        ),
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "kwargs"),
    [
        (CARTPOLE, cartpole, {}),
        (cartpole, cartpole, {}),
        (transformed, transformed, {}),
        (cartpole, cartpole, {"max_frames_per_traj": 3}),
        (CARTPOLE, cartpole, {"max_frames_per_traj": 3}),
        (transformed, transformed, {"compact_obs": True}),
        (CARTPOLE, cartpole, {"compact_obs": True}),
        (cartpole, cartpole, {"set_truncated": True}),
        (CARTPOLE, cartpole, {"set_truncated": True}),
    ],
)
def test_layout_is_the_stock_collectors(ours: Any, theirs: Any, kwargs: dict[str, Any]) -> None:
    """Keys, shapes, data types and names, but for the version that every batch of ours carries."""
    policy = categorical(num_actions=2)
    expected = stock(theirs, policy, **kwargs)
    found = first_batch([ours] * 2, policy, **kwargs)
    assert found.shape == expected.shape
    assert found.names == [None, "time"]
    assert "policy_version" in found.keys()

    def layout(td: TensorDict) -> dict[Any, Any]:
        return {
            key: (value.shape, value.dtype)
            for key, value in td.exclude("policy_version").items(True, True)
        }

    assert layout(found) == layout(expected)


def test_torchrl_environment_gives_the_stock_collectors_values() -> None:
    """Every transform's output, over several episodes, with a deterministic policy."""
    policy = TensorDictModule(
        lambda o: (o[..., 2] > 0).long(), in_keys=["observation"], out_keys=["action"]
    )
    with HTSCollector([transformed], policy, frames_per_batch=300, seed=5) as collector:
        found = next(iter(collector))[0]
        seed = int(np.random.SeedSequence([5, 0, 0]).generate_state(1)[0])
    env = transformed()
    env.set_seed(seed)
    expected = env.rollout(300, policy, break_when_any_done=False)
    assert found["next", "done"].sum() > 3
    for key, value in expected.items(True, True):
        assert torch.equal(found[key], value), key


def test_the_gym_path_draws_what_the_torchrl_path_draws() -> None:
    """TorchRL's set_seed resets with another seed: so of a policy that ignores the observation."""
    policy = categorical(num_actions=2)
    for parameter in policy.parameters():
        if parameter.ndim > 1:
            parameter.data.zero_()  # the biases are left
    fast, full = (collect([env] * 2, policy, rounds=20) for env in (CARTPOLE, cartpole))
    assert fast["next", "done"].any()
    assert set(fast.keys(True, True)) == set(full.keys(True, True))
    assert len(fast["action"].unique()) == 2
    for key in ("action", "action_log_prob"):
        assert torch.equal(fast[key], full[key])
