"""Noise on actions that was made without a spec gets the environment's, as in TorchRL."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
from collectors import one_batch
from environments import EchoEnv
from gymnasium.spaces import Discrete
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import GymEnv
from torchrl.modules import AdditiveGaussianModule

from torchrl_hts import PolicyError

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]


def noisy(**options: Any) -> TensorDictSequential:
    net = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
    noise = AdditiveGaussianModule(spec=None, sigma_init=50.0, sigma_end=50.0, **options)
    return TensorDictSequential(net, noise)


@pytest.mark.parametrize("make", [partial(GymEnv, "Pendulum-v1"), partial(gym.make, "Pendulum-v1")])
def test_it_is_that_of_the_environment(make: Any) -> None:
    """The learner's copy has it too."""
    policy = noisy()
    actions = one_batch(make, policy)["action"]
    assert (actions.abs() == 2).any(), "clipped"
    assert actions.abs().max() == 2
    assert policy[1].spec["action"].space.high.item() == 2


def test_there_may_be_none_to_give() -> None:
    policy = TensorDictSequential(
        TensorDictModule(nn.Linear(4, 1).double(), ["observation"], ["action"]),
        AdditiveGaussianModule(spec=None),
    )
    with pytest.raises(PolicyError, match=r"spec has not been set. Pass spec at construction"):
        one_batch(partial(EchoEnv, action_space=Discrete(3)), policy)
