"""What users bring is measured as the collector takes it, or refused in a sentence."""

from __future__ import annotations

import pickle
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torchrl_environments
from environments import EchoEnv
from tensordict import TensorDict
from test_bench import SampledEnv
from torchrl.envs import SerialEnv

from torchrl_hts.bench.__main__ import main
from torchrl_hts.bench.measuring import default_policy, measure_learning, measure_passes


def make_pictures() -> gym.Env:
    pixels = gym.spaces.Box(0, 255, (1, 36, 36), np.uint8)
    return gym.wrappers.TimeLimit(SampledEnv(pixels, gym.spaces.Discrete(2)), 10)


def make_new_tensordicts() -> Any:
    """A policy that is no module, whose keys the environment has to tell."""
    return lambda td: TensorDict({"action": torch.ones(td.shape, dtype=torch.int64)}, td.shape)


def make_serial() -> SerialEnv:
    return SerialEnv(3, torchrl_environments.cartpole)


@pytest.mark.parametrize(
    "named",
    [
        "--env-id test_bench_measuring:make_pictures",
        "--env-id test_bench:EchoFactory --policy test_bench_measuring:make_new_tensordicts",
        "--env-id test_bench_measuring:make_serial --policy test_bench:make_policy",
    ],
)
def test_what_the_collector_takes_is_measured(
    named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Networks whose weights actors reorder, callables, and batches that are taken apart."""
    flags = "--seconds 0.05 --num-envs 2 8 --alpha 5 --lag 1 --actors 1"
    assert main([*flags.split(), *named.split()]) == 0
    printed = capsys.readouterr()
    assert re.match(r"Take [28] environments, alpha 5, lag 1, 1 actor: ", printed.out)
    apart = "a batch of 3 environments, which the collector takes apart" in printed.err
    assert apart is ("make_serial" in named)


def test_measuring_leaves_the_policy_as_it_is() -> None:
    policy = default_policy(make_pictures())
    before = pickle.dumps(policy)
    measure_passes(make_pictures, policy, [1, 8], 0.0)
    assert measure_learning(make_pictures, policy, 0.0) > 0
    assert pickle.dumps(policy) == before


def make_wide_batch() -> gym.vector.VectorEnv:
    return gym.vector.SyncVectorEnv([EchoEnv] * 600)


class Failing(EchoEnv):
    """Fails as an environment may."""

    def step(self, action: Any) -> Any:
        raise TypeError("unsupported operand")


class Exiting(EchoEnv):
    """Ends its process, as scripts do."""

    def step(self, action: Any) -> Any:
        raise SystemExit(4)


class Misshapen(EchoEnv):
    """Doesn't observe what its space says."""

    def reset(self, **given: Any) -> Any:
        super().reset(**given)
        return np.zeros(7, np.float32), {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--env-id test_bench_measuring:make_wide_batch --num-envs 200",
            "--num-envs 200 batches of 600 are 120000 environments; a collector has at most 65535",
        ),
        (
            "--env-id test_bench_measuring:Failing",
            "the environment failed while it was stepped at random: TypeError: unsupported operand",
        ),
        (
            "--env-id test_bench_measuring:Exiting",
            "the environment failed while it was stepped at random: SystemExit: 4",
        ),
        (
            "--env-id test_bench_measuring:Misshapen",
            "the environment returned 'observation' of shape (7,); its observation space says (",
        ),
    ],
)
def test_what_cannot_be_measured_is_said(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = "--policy test_bench:make_echo_policy --seconds 0.01"
    assert main([*flags.split(), *named.split()]) == 2
    assert f"error: {message}" in capsys.readouterr().err
