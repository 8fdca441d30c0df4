"""One environment in no list: batches are those of TorchRL's `Collector`."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from environments import EchoEnv
from policies import categorical
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv, SerialEnv

from torchrl_hts import EpisodeReturns, HTSCollector, RunningRewardNorm

pytestmark = pytest.mark.usefixtures("nothing_left")

CARTPOLE = partial(gym.make, "CartPole-v1")
OF_TORCHRL = partial(GymEnv, "CartPole-v1")


def gather(env: Any, **kwargs: Any) -> list[TensorDictBase]:
    kwargs = {"frames_per_batch": 40, "total_frames": 120, "seed": 0} | kwargs
    with HTSCollector(env, **kwargs) as collector:
        return [batch.clone() for batch in collector]


def test_its_batches_have_a_dimension_for_time_alone() -> None:
    alone, listed = gather(CARTPOLE), gather([CARTPOLE])
    assert [batch.shape for batch in alone] == [(40,)] * 3
    assert alone[0].names == ["time"]
    for one, of_one in zip(alone, listed, strict=True):
        assert of_one.shape == (1, 40)
        assert (one == of_one[0]).all()
    assert gather(OF_TORCHRL)[0].shape == (40,)


@pytest.mark.parametrize("make", [CARTPOLE, OF_TORCHRL, gym.make])
def test_keyword_arguments_make_no_difference(make: Any) -> None:
    kwargs = {"id": "CartPole-v1"} if make is gym.make else {"max_episode_steps": 9}
    assert gather(make, create_env_kwargs=kwargs)[0].shape == (40,)


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [
        (CARTPOLE, {"num_workers": 1}),
        (CARTPOLE, {"cat_results": "stack"}),
        (SerialEnv(1, OF_TORCHRL), {}),
        (partial(SerialEnv, 1, OF_TORCHRL), {}),
        (partial(gym.make_vec, "CartPole-v1", 1), {}),
    ],
)
def test_a_batch_of_one_keeps_its_row(env: Any, kwargs: dict[str, Any]) -> None:
    assert gather(env, **kwargs)[0].shape == (1, 40)


def test_a_replay_buffer_takes_its_steps() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1_000))
    for batch in gather(CARTPOLE):
        buffer.extend(batch)
    assert len(buffer) == 120


def test_what_goes_along_with_batches_takes_them() -> None:
    returns = EpisodeReturns(), EpisodeReturns()
    rewards = RunningRewardNorm(1), RunningRewardNorm(1)
    for one, of_one in zip(gather(CARTPOLE), gather([CARTPOLE]), strict=True):
        assert returns[0].update(one) == returns[1].update(of_one)
        rewards[0].normalize_(one)
        rewards[1].normalize_(of_one)
        assert torch.equal(one["next", "reward"], of_one["next", "reward"][0])
    assert returns[0].count > 2
    assert rewards[0].var != 1


def test_ends_that_the_collector_has_marked_are_none() -> None:
    returns = [EpisodeReturns(set_truncated=True) for _ in range(2)]
    alone, listed = gather(CARTPOLE, set_truncated=True), gather([CARTPOLE], set_truncated=True)
    for one, of_one in zip(alone, listed, strict=True):
        assert returns[0].update(one) == returns[1].update(of_one)
    assert returns[0].count > 2


@pytest.mark.parametrize("set_truncated", [False, True])
def test_several_in_a_row_are_not_taken_for_one(set_truncated: bool) -> None:
    """At the second batch at the latest."""
    batches = gather([CARTPOLE] * 2, cat_results=0, set_truncated=set_truncated)
    returns = EpisodeReturns(set_truncated=set_truncated)
    with pytest.raises(ValueError, match=r"expected a batch .*, and got \[40\]"):
        list(map(returns.update, batches))


def test_several_flags_of_a_step_are_told() -> None:
    (batch, *_) = gather(CARTPOLE)
    batch["next", "done"] = batch["next", "done"].expand(40, 3)
    with pytest.raises(ValueError, match="expected one done of each step"):
        EpisodeReturns().update(batch)


@pytest.mark.parametrize("name", ["device", "storing_device"])
def test_batches_say_where_they_are_if_that_was_asked(name: str) -> None:
    options: dict[str, Any] = {"policy": categorical(), "frames_per_batch": 8, "total_frames": 8}
    (said,), (plain,) = (
        gather([EchoEnv] * 2, **{name: "cpu"}, **options),
        gather([EchoEnv] * 2, **options),
    )
    assert said.device == said["next"].device == torch.device("cpu")
    assert plain.device is None
    assert (said == plain).all()
