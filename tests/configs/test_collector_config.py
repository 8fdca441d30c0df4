"""The collector's configuration: which collector comes of it, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import policies
import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING
from tensordict import TensorDictBase
from torchrl.trainers.algorithms.configs import PPOTrainerConfig  # noqa: F401  # registers them all
from torchrl.trainers.algorithms.configs.envs import BatchedEnvConfig, TransformedEnvConfig

from torchrl_hts.configs import (
    GymnasiumEnvConfig,
    HTSCollectorConfig,
)
from torchrl_hts.configs.make import make_collector

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:.*(experimental/prototype|hook stage will be replaced)"),
]


def actions_of(batch: TensorDictBase) -> torch.Tensor:
    return batch["action"]


def collector_config(**changes: Any) -> HTSCollectorConfig:
    arguments: dict[str, Any] = {
        "create_env_fn": GymnasiumEnvConfig(id="CartPole-v1"),
        "policy": {"_target_": "policies.categorical", "num_actions": 2},
        "frames_per_batch": 24,
        "total_frames": 24,
        **changes,
    }
    return HTSCollectorConfig(**arguments)


def batched(num_workers: int) -> BatchedEnvConfig:
    return BatchedEnvConfig(
        create_env_fn=GymnasiumEnvConfig(id="CartPole-v1"), num_workers=num_workers
    )


def transformed(base_env: Any, transform: str = "StepCounter") -> TransformedEnvConfig:
    target = f"torchrl.envs.transforms.{transform}"
    return TransformedEnvConfig(base_env=base_env, transform={"_target_": target})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1),
        ({"num_envs": 3}, 3),
        ({"num_workers": 2}, 2),
        ({"num_envs": 3, "num_workers": 2}, 3),
        ({"create_env_fn": batched(3), "num_workers": 2}, 6),
        ({"create_env_fn": batched(3), "num_envs": 2}, 2),
        ({"create_env_fn": [GymnasiumEnvConfig(id="CartPole-v1")] * 3, "num_workers": 3}, 3),
        ({"create_env_fn": [batched(2), batched(1)]}, 3),
        ({"create_env_fn": transformed(batched(3)), "num_workers": 2}, 6),
        ({"create_env_fn": transformed(transformed(batched(2)))}, 2),
        ({"create_env_fn": transformed({"_target_": "torchrl_environments.cartpole"})}, 1),
    ],
)
def test_number_of_environments(changes: dict[str, Any], expected: int) -> None:
    with instantiate(collector_config(num_executors=1, **changes)) as collector:
        assert collector.num_envs == expected


def test_every_value_reaches_the_collector() -> None:
    config = collector_config(
        policy=None,
        policy_factory={"_target_": "policies.categorical", "num_actions": 2, "_partial_": True},
        create_env_fn={"_target_": "gymnasium.make", "id": "CartPole-v1", "_partial_": True},
        create_env_kwargs=[{"max_episode_steps": 3}, {"max_episode_steps": 4}],
        num_envs=2,
        exploration_type="mode",
        lag=2,
        seed=5,
        postproc={"_target_": "test_collector_config.actions_of", "_partial_": True},
    )
    with instantiate(config) as collector:
        assert (collector.lag, collector.seed) == (2, 5)
        assert collector.exploration_type.name in ("MODE", "DETERMINISTIC")
        actions = next(iter(collector))
    assert isinstance(actions, torch.Tensor)
    assert actions.shape == (2, 12)


def test_objects_are_taken_as_they_are() -> None:
    """As arguments of `instantiate`, in place of configurations."""
    policy = policies.categorical(4, 2)
    config = collector_config(create_env_fn=MISSING, policy=None, num_envs=2)
    make_env = partial(gym.make, "CartPole-v1")
    with instantiate(config, policy=policy, create_env_fn=make_env) as collector:
        assert collector.num_envs == 2
        assert collector.policy is policy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 0}, "num_envs must be at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be at least 1, got -1"),
        ({"create_env_fn": batched(0)}, "num_workers of the batched environment must be at least"),
        (
            {"create_env_fn": [GymnasiumEnvConfig(id="CartPole-v1")], "num_envs": 2},
            "num_envs=2, but create_env_fn lists 1 environments",
        ),
        (
            {"create_env_fn": [GymnasiumEnvConfig(id="CartPole-v1")] * 2, "num_workers": 4},
            "num_workers=4, but create_env_fn lists 2 environments",
        ),
        (
            {"create_env_fn": {**vars(batched(2)), "create_env_kwargs": [{}, {}]}},
            r"create_env_kwargs of the batched environment must be a mapping, got \[\{\}, \{\}\]",
        ),
        ({"create_env_fn": transformed(batched(2), "VecNorm")}, "a VecNorm around a batched env"),
        ({"create_env_fn": {"id": "CartPole-v1"}}, "with a _target_, such as"),
        ({"create_env_fn": GymnasiumEnvConfig()}, "Missing mandatory value: id"),
        ({"exploration_type": "BOLD"}, "must be one of MODE, .*; got 'BOLD'"),
        ({"policy_factory": {"_target_": "policies.categorical"}}, "either policy or policy_fact"),
        ({"lag": -1}, "lag must be at least 0"),
    ],
)
def test_arguments_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InstantiationException, match=message):
        instantiate(collector_config(**changes))


@pytest.mark.parametrize("kind", [None, 3])
def test_exploration_types_that_are_none(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"exploration_type must be one of MODE, .*; got {kind}"):
        make_collector(None, exploration_type=kind)
