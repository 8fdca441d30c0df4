"""`SerialEnv` and `ParallelEnv` are taken apart, whoever makes them."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from collectors import one_batch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.envs import (
    Compose,
    EnvCreator,
    GymEnv,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from torchrl.modules import LSTMModule

from torchrl_hts._planning.arguments import check_factories

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]

SINGLE = partial(GymEnv, "Pendulum-v1")


def make_parallel() -> Any:
    return ParallelEnv(3, SINGLE)


def make_serial_elsewhere() -> Any:
    from torchrl import envs

    return envs.SerialEnv(3, [SINGLE] * 3)


@pytest.mark.parametrize(
    "source",
    [
        SerialEnv(3, SINGLE),
        [SerialEnv(2, SINGLE), SINGLE],
        partial(SerialEnv, 3, SINGLE),
        lambda: SerialEnv(3, SINGLE),
        make_parallel,
        make_serial_elsewhere,
    ],
)
def test_their_environments_become_the_collectors(source: Any) -> None:
    factories = check_factories(source, None)
    assert [type(factory()) for factory in factories] == [type(SINGLE())] * 3


def test_those_of_an_env_creator_become_the_collectors() -> None:
    """Made here and not while tests are collected: it makes its environment at once."""
    factories = check_factories(EnvCreator(partial(SerialEnv, 3, SINGLE)), None)
    assert [type(factory()) for factory in factories] == [type(SINGLE())] * 3


def test_a_batch_is_that_of_single_environments() -> None:
    assert (one_batch(SerialEnv(3, SINGLE)) == one_batch([SINGLE] * 3)).all()


def test_arguments_reach_the_right_callable() -> None:
    def make(n: int) -> Any:
        return SerialEnv(n, SINGLE, create_env_kwargs=[{"frame_skip": 2}] * n)

    factories = check_factories(make, {"n": 4})
    assert len(factories) == 4
    assert factories[0]().frame_skip == 2
    (one, _) = check_factories(SerialEnv(2, SINGLE), {"frame_skip": 3})
    assert one().frame_skip == 3
    assert len(check_factories(make_parallel, None, copies=2)) == 6


def test_transforms_around_the_batch_go_around_each() -> None:
    transforms = [RewardSum(), StepCounter(max_steps=2)]
    outside = TransformedEnv(SerialEnv(3, SINGLE), Compose(*transforms))
    inside = lambda: TransformedEnv(SINGLE(), Compose(RewardSum(), StepCounter(max_steps=2)))  # noqa: E731
    assert (one_batch(outside) == one_batch([inside] * 3)).all()


def test_transforms_of_the_whole_batch_are_refused() -> None:
    env = TransformedEnv(SerialEnv(2, SINGLE), VecNorm(in_keys=["observation"]))
    with pytest.raises(TypeError, match="a VecNorm around a batched environment works on all"):
        check_factories(env, None)


def test_an_environment_of_gymnasium_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a callable that makes an environment"):
        check_factories([gym.make("Pendulum-v1")], None)


def test_factories_that_speak_of_none_are_not_called() -> None:
    def make() -> Any:
        raise AssertionError

    assert check_factories(make, None) == [make]


def recurrent() -> TensorDictSequential:
    lstm = LSTMModule(3, 4, in_key="observation", out_key="embedding")
    return TensorDictSequential(
        lstm, TensorDictModule(torch.nn.Linear(4, 1), ["embedding"], ["action"])
    )


def test_what_a_recurrent_policy_needs_is_put_around_environments() -> None:
    torch.manual_seed(0)
    policy = recurrent()
    given = lambda: TransformedEnv(  # noqa: E731
        SINGLE(), Compose(InitTracker(), policy[0].make_tensordict_primer())
    )
    kwargs: dict[str, Any] = {"policy": policy, "auto_register_policy_transforms": True}
    wanted = one_batch([given] * 2, policy=policy)
    assert (one_batch([given] * 2, **kwargs) == wanted).all()
    assert (one_batch([SINGLE] * 2, **kwargs) == wanted).all()
    one_batch([partial(gym.make, "Pendulum-v1")] * 2, **kwargs)
