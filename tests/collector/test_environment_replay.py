"""An environment of a collector, once more outside of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from seeding import Seeding
from tensordict import TensorDictBase
from walks import FIRST_SEED, Raises, Walk

from torchrl_hts import EnvironmentReplay, HTSCollector, TorchRLReplay, WorkerError
from torchrl_hts._learner.learner import environment_seed
from torchrl_hts.env_state import save_environment
from torchrl_hts.env_state.compressed import compressed

pytestmark = pytest.mark.usefixtures("nothing_left")

MAKE_CARTPOLE = functools.partial(gym.make, "CartPole-v1")


def played(replay: EnvironmentReplay, row: TensorDictBase) -> list[float]:
    """The rewards of the actions in a row of a batch."""
    rewards = []
    for step in row:
        reward, done = replay.step(step["action"])
        rewards.append(reward)
        if done:
            replay.begin_episode()
    return rewards


@pytest.mark.parametrize(
    "make_env", [Walk, MAKE_CARTPOLE, Seeding], ids=["a walk", "CartPole", "seeds with nothing"]
)
def test_i7_the_same_actions_lead_to_the_same(make_env: Callable[[], Any]) -> None:
    """From the beginning, from a collector's state on, and from one's own."""
    with HTSCollector(
        [make_env] * 3, frames_per_batch=3 * 32, total_frames=3 * 32 * 4, seed=5
    ) as collector:
        batches = []
        for batch in collector:
            batches.append(batch)
            if len(batches) == 1:  # with a lag of 1, round 1 is full as well
                state = collector.state_dict()
    replay, resumed = (EnvironmentReplay(make_env, 1, seed=5) for _ in range(2))
    replay.reset()
    resumed.restore(state["environments"][1])
    for round_, batch in enumerate(batches):
        expected = batch["next", "reward"][1].flatten()
        assert torch.equal(torch.tensor(played(replay, batch[1])), expected)
        if round_ >= 2:
            assert torch.equal(torch.tensor(played(resumed, batch[1])), expected)
    again = EnvironmentReplay(make_env, 1, seed=5)
    again.restore(replay.save())
    assert played(again, batches[0][1][:3]) == played(replay, batches[0][1][:3])


def test_a_state_of_an_environment_that_shows_nothing_is_shown() -> None:
    make_env = functools.partial(gym.make, "Walk-v0")
    with HTSCollector([make_env] * 2, frames_per_batch=16, total_frames=32, seed=5) as collector:
        next(iter(collector))
        state = collector.state_dict()
    replay = EnvironmentReplay(functools.partial(make_env, render_mode="rgb_array"), 0, seed=5)
    replay.restore(state["environments"][0])
    assert replay.env.render_mode == "rgb_array"
    assert replay.env.render().shape == (48, 64, 3)


def test_the_steps_before_a_failure() -> None:
    assert environment_seed(0, 2, 0) == FIRST_SEED
    collector = HTSCollector(
        [Raises] * 4, frames_per_batch=4 * 100, total_frames=4 * 1000, seed=0, lag=2
    )
    rows: list[TensorDictBase] = []
    with collector, pytest.raises(WorkerError, match="the wing came off at") as failure:
        rows.extend(batch[2] for batch in collector)
    assert failure.value.env_indices == (2,)
    assert (failure.value.round, failure.value.step) == (6, 45)
    ahead = collector.steps_ahead(2)
    assert len(ahead) == 645 + 1 - 100 * len(rows)
    replay = EnvironmentReplay(Raises, 2, seed=0)
    replay.reset()
    for row in (*rows, ahead[:-1]):
        expected = row["next", "reward"].flatten()
        assert torch.equal(torch.tensor(played(replay, row)), expected)
    with pytest.raises(ValueError, match="the wing came off at"):
        replay.step(ahead["action"][-1])


@pytest.mark.parametrize(
    "make_env",
    [
        functools.partial(gym.make_vec, "CartPole-v1", num_envs=2),
        functools.partial(torch.nn.Linear, 2, 2),
    ],
)
def test_what_is_no_single_environment_is_refused(make_env: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="plays a single gymnasium environment; its factory made"):
        EnvironmentReplay(make_env, 0, seed=0)


@pytest.mark.parametrize("make_env", [None, [MAKE_CARTPOLE], MAKE_CARTPOLE()])
@pytest.mark.parametrize("replay", [EnvironmentReplay, TorchRLReplay])
def test_what_makes_no_environment_is_refused(replay: Any, make_env: Any) -> None:
    with pytest.raises(TypeError, match=r"^create_env_fn is a \w+; expected (a|one) callable that"):
        replay(make_env, 0, seed=0)


@pytest.mark.parametrize("action", [1, np.int64(1), [1], torch.tensor(1), torch.tensor([0, 1])])
def test_actions_in_any_form(action: Any) -> None:
    replay, expected = (EnvironmentReplay(MAKE_CARTPOLE, 0, seed=0) for _ in range(2))
    for one in (replay, expected):
        one.reset()
    replay.step(action)
    expected.step(torch.tensor(1))
    assert torch.equal(replay.save(), expected.save())


@pytest.mark.parametrize("action", [None, "x", 1.5, 2, [1, 1], [0, 0], [0, 1, 0], {"a": 1}])
def test_what_is_no_action_is_refused(action: Any) -> None:
    replay = EnvironmentReplay(MAKE_CARTPOLE, 0, seed=0)
    replay.reset()
    before = replay.save()
    with pytest.raises((TypeError, ValueError), match="action"):
        replay.step(action)
    assert torch.equal(replay.save(), before)


@pytest.mark.parametrize("state", [None, "x", b"x"])
def test_what_is_no_state_is_refused(state: Any) -> None:
    replay = EnvironmentReplay(MAKE_CARTPOLE, 0, seed=0)
    with pytest.raises(TypeError, match="expected a state as a tensor of bytes"):
        replay.restore(state)


def test_states_that_are_none_of_a_single_environment_are_refused() -> None:
    replay = EnvironmentReplay(MAKE_CARTPOLE, 0, seed=0)
    replay.reset()
    saved = replay.save()
    saved[len(saved) // 2] ^= 1
    with pytest.raises(ValueError, match=r"state .* is damaged"):
        replay.restore(saved)
    make_batch = functools.partial(gym.make_vec, "CartPole-v1", 2, "sync")
    with HTSCollector([make_batch], frames_per_batch=4, total_frames=8, seed=0) as collector:
        next(iter(collector))
        of_batch = collector.state_dict()["environments"][0]
    with pytest.raises(ValueError, match="or that of a batch of environments"):
        replay.restore(of_batch)
    alone = torch.frombuffer(bytearray(compressed(save_environment(replay.env))), dtype=torch.uint8)
    with pytest.raises(ValueError, match="the state is of save_environment alone"):
        replay.restore(alone)
