"""``replay_buffer``: batches go there instead of being handed out."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from collectors import collect, start
from environments import EchoEnv
from policies import categorical
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
)
from torchrl.envs import MultiStepTransform
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from torchrl_hts import DelayedGradient, EpisodeReturns, HTSCollector, UndelayedUpdateWarning

pytestmark = [pytest.mark.usefixtures("collectors_end"), pytest.mark.timeout(120)]

CARTPOLES = [partial(gym.make, "CartPole-v1")] * 2


def buffer_of(size: int = 100, **kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(size), **kwargs)


def test_items_are_the_steps_in_the_order_of_the_batches() -> None:
    buffer = buffer_of()
    with start([EchoEnv] * 2, replay_buffer=buffer, total_frames=24) as collector:
        assert [*collector] == [None] * 3
    batches = collect([EchoEnv] * 2, categorical())
    expected = torch.cat([batch.reshape(-1) for batch in batches.split(4, 1)])
    assert len(buffer) == buffer.write_count == 24
    assert (buffer[:] == expected).all()


def test_what_hooks_and_postproc_make_of_a_batch() -> None:
    """They come before the buffer; returns are counted by the hook."""

    def doubled(batch: TensorDictBase) -> TensorDictBase:
        batch["next", "reward"] = batch["next", "reward"] * 2
        return batch[:, :2]

    returns, buffer = EpisodeReturns(2), buffer_of()
    seen: list[Any] = []
    options: dict[str, Any] = {
        "post_collect_hook": lambda batch: seen.append(returns.update(batch)),
        "replay_buffer": buffer,
        "total_frames": 24,
    }
    with start([EchoEnv] * 2, postproc=doubled, **options) as collector:
        for _ in collector:
            pass
    assert len(seen) == 3
    assert len(buffer) == 12
    assert buffer[0]["next", "reward"] == 2


def test_trajectories_are_items_of_their_own() -> None:
    buffer = buffer_of()
    options: dict[str, Any] = {"split_trajs": True, "frames_per_batch": 20, "total_frames": 20}
    with start([EchoEnv] * 2, replay_buffer=buffer, **options) as collector:
        assert next(iter(collector)) is None
    assert buffer[:].shape == (4, 5)
    assert buffer[:]["collector", "mask"].shape == (4, 5)


def test_storages_of_two_dimensions_take_batches_as_they_are() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(48, ndim=2), dim_extend=1)
    with start([EchoEnv] * 2, replay_buffer=buffer, total_frames=24) as collector:
        for _ in collector:
            pass
    assert buffer[:].shape == (2, 12)
    assert (buffer[:]["observation"] == collect([EchoEnv] * 2, categorical())["observation"]).all()


class Elsewhere(ReplayBuffer):
    """Shows no storage, as one that lives in a Ray actor."""

    def __init__(self) -> None:
        self.extended: list[Any] = []

    def extend(self, data: Any) -> None:
        self.extended.append(data.shape)


def test_a_buffer_in_another_process() -> None:
    buffer = Elsewhere()
    with start([EchoEnv] * 2, replay_buffer=buffer, total_frames=24) as collector:
        for _ in collector:
            pass
    assert buffer.extended == [torch.Size([8])] * 3


def test_slices_are_of_one_trajectory() -> None:
    sampler = SliceSampler(slice_len=3, traj_key=("collector", "traj_ids"))
    buffer = buffer_of(sampler=sampler, batch_size=30)
    with start([EchoEnv] * 3, replay_buffer=buffer, total_frames=48) as collector:
        for _ in collector:
            pass
    slices = buffer.sample().reshape(10, 3)
    assert (slices["observation"].diff(dim=1)[..., :3] == torch.tensor([0.0, 0, 1])).all()


@pytest.mark.parametrize("collector_extends", [True, False])
def test_a_dqn_loop_of_torchrl(collector_extends: bool) -> None:
    """With random frames first, and no warning that a block is missing."""
    network = nn.Linear(4, 2)
    policy = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss_module = DQNLoss(policy, action_space="categorical", delay_value=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)
    buffer = buffer_of(200, batch_size=16)
    collector = HTSCollector(
        CARTPOLES,
        policy,
        frames_per_batch=8,
        total_frames=80,
        init_random_frames=32,
        replay_buffer=buffer if collector_extends else None,
        seed=0,
    )
    before = network.weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UndelayedUpdateWarning)
        for batch in collector:
            if not collector_extends:
                buffer.extend(batch.reshape(-1))
            if buffer.write_count < collector.init_random_frames:
                assert (network.weight == before).all()
                continue
            sample = buffer.sample()
            loss_module(sample)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            collector.update_policy_weights_()
    assert buffer.write_count == 80
    assert not buffer[:32]["action_value"].any(), "the policy wasn't asked"
    assert buffer[32:]["action_value"].all()
    assert (network.weight != before).any()


class Run:
    """A DQN loop that can be stopped between two batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        policy = QValueActor(nn.Linear(4, 2), in_keys=["observation"], action_space="categorical")
        self.loss = DQNLoss(policy, action_space="categorical", delay_value=True)
        self.loss.make_value_estimator(gamma=0.9)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-2)
        self.buffer = buffer_of(batch_size=16)
        options: dict[str, Any] = {"init_random_frames": 16, "total_frames": 80}
        self.collector = start(CARTPOLES, policy, replay_buffer=self.buffer, **options)
        self.parts = (self.loss, self.optimizer, self.buffer, self.collector)

    def learn(self, rounds: int) -> None:
        for _, _ in zip(range(rounds), self.collector, strict=False):
            self.loss(self.buffer.sample())["loss"].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def digest(self) -> dict[str, bytes]:
        tensors = {**self.loss.state_dict(), **self.buffer[:].flatten_keys().to_dict()}
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_a_run_is_resumed_bit_for_bit() -> None:
    """With the buffer, which the collector's state doesn't hold, and the generator of samples."""
    whole = Run()
    whole.learn(10)
    first = Run()
    first.learn(4)
    states = [copy.deepcopy(part.state_dict()) for part in first.parts]
    generator = torch.get_rng_state()
    second = Run()
    for part, state in zip(second.parts, states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(generator)
    second.learn(6)
    assert second.digest() == whole.digest()
    first.collector.shutdown()


def test_attributes_that_trainers_read() -> None:
    buffer = buffer_of()
    with start([EchoEnv], replay_buffer=buffer, init_random_frames=10) as collector:
        assert collector.replay_buffer is buffer
        assert collector.init_random_frames == 10
        next(iter(collector))
        assert collector.getattr_rb("write_count") == 4
    with start([EchoEnv]) as collector:
        assert collector.replay_buffer is None
        with pytest.raises(AttributeError, match="was made without replay_buffer"):
            collector.getattr_rb("write_count")


def n_steps(**storage: Any) -> ReplayBuffer:
    """A buffer that adds up the rewards of three steps."""
    transform = MultiStepTransform(n_steps=3, gamma=1.0)
    options: dict[str, Any] = {"dim_extend": 1} if storage else {}
    return ReplayBuffer(
        storage=LazyTensorStorage(100, **storage), transform=transform, batch_size=4, **options
    )


def test_returns_of_several_steps_stay_within_an_environment() -> None:
    with pytest.raises(ValueError, match="MultiStepTransform of replay_buffer would go on from"):
        start([EchoEnv] * 2, replay_buffer=n_steps())
    for envs, buffer in [([EchoEnv] * 2, n_steps(ndim=2)), (EchoEnv, n_steps())]:
        options: dict[str, Any] = {"frames_per_batch": 24, "total_frames": 24, "seed": 0}
        with HTSCollector(envs, categorical(), replay_buffer=buffer, **options) as collector:
            for _ in collector:
                pass
        steps = buffer[:].reshape(-1)
        assert (steps["observation"][:, 0] == steps["next", "observation"][:, 0]).all()
        first = steps[steps["observation"][:, 2] == 0]
        assert (first["next", "reward"] == 1 + 2 + 3).all()


def test_flat_batches_dont_fit_into_storages_of_two_dimensions() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(48, ndim=2), dim_extend=1)
    said = "storage of replay_buffer has 2 dimensions, and batches are flat: give one of one"
    for envs, options in [(EchoEnv, {}), ([EchoEnv] * 2, {"cat_results": 0})]:
        with pytest.raises(ValueError, match=said):
            HTSCollector(envs, frames_per_batch=8, replay_buffer=buffer, **options)


def test_a_delayed_gradient_over_it() -> None:
    """One of another lag is told, and so is who takes the iterator's items for batches."""
    policy = categorical()
    delayed = DelayedGradient(policy, lag=2)
    with start([EchoEnv], policy, replay_buffer=buffer_of(), lag=1) as collector:
        iterator = iter(collector)
        with pytest.raises(TypeError, match="and so does a collector with a replay_buffer"):
            delayed(next(iterator))
        batch = collector.replay_buffer[:]
        with delayed(batch):
            pass
        with pytest.raises(ValueError, match="DelayedGradient has lag=2, and the collector lag"):
            next(iterator)


def test_what_does_not_go_with_it() -> None:
    with pytest.raises(TypeError, match=r"return_same_td=True hands out slots.* leave one of them"):
        start([EchoEnv], replay_buffer=buffer_of(), return_same_td=True)
    with pytest.raises(TypeError, match=r"must be a torchrl\.data\.ReplayBuffer, got a list"):
        start([EchoEnv], replay_buffer=[])
