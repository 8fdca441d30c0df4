"""A TorchRL environment of a collector, or a batch of them, once more outside of it."""

from __future__ import annotations

import functools
import math

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import (
    Compose,
    GymEnv,
    NoopResetEnv,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)
from torchrl_environments import Clocks

from torchrl_hts import HTSCollector, InvalidValueError, TorchRLReplay

pytestmark = pytest.mark.usefixtures("nothing_left")


def single() -> TransformedEnv:
    """Its resets draw from torch's generator."""
    transforms = Compose(NoopResetEnv(noops=4, random=True), StepCounter(12))
    return TransformedEnv(GymEnv("CartPole-v1"), transforms)


MAKERS = {
    "a single one": single,
    "processes of TorchRL's": functools.partial(SerialEnv, 3, single),
    "a batch": functools.partial(Clocks, 5, 7, 9),
}


@pytest.mark.parametrize("made", MAKERS)
def test_i7_the_same_actions_lead_to_the_same(made: str) -> None:
    """Over the ends of episodes, and in every environment of a batch."""
    make_env = MAKERS[made]
    with HTSCollector(
        [make_env] * 2, frames_per_batch=6 * 20, total_frames=6 * 40, seed=5
    ) as collector:
        batches: list[TensorDictBase] = list(collector)
    last = collector.num_envs - 1
    replay = TorchRLReplay(make_env, last, seed=5)
    assert [*replay.envs] == ([3, 4, 5] if made == "a batch" else [last])
    replay.reset()
    for batch in batches:
        rows = batch[replay.envs.start : replay.envs.stop]
        for step in rows.unbind(1):
            after = replay.step(step)
            for key in ("observation", "reward", "done"):
                assert torch.equal(after[key], step["next", key]), key
    assert sum(int(batch["next", "done"].sum()) for batch in batches) > 6
    replay.close()


@pytest.mark.parametrize("made", MAKERS)
def test_i7_a_replay_goes_on_from_a_state(made: str) -> None:
    """Of the collector's, and of another replay's."""
    make_env = MAKERS[made]
    with HTSCollector([make_env] * 2, frames_per_batch=6 * 20, total_frames=6 * 60, seed=5) as data:
        batches = iter(data)
        next(batches)
        state = data.state_dict()  # after the batch that is collected already
        rest: list[TensorDictBase] = list(batches)[len(state["collected"]) :]
    last = data.num_envs - 1
    replay, other = (TorchRLReplay(make_env, last, seed=5) for _ in range(2))
    replay.restore(state["environments"][-1])
    rows = torch.cat(rest, 1)[replay.envs.start : replay.envs.stop]
    for t, step in enumerate(rows.unbind(1)):
        if t == 15:
            other.restore(replay.save())
        players = [replay] if t < 15 else [replay, other]
        for player in players:
            after = player.step(step)
            for key in ("observation", "reward", "done"):
                assert torch.equal(after[key], step["next", key]), (t, key)
    assert rows["next", "done"].any()
    replay.close()
    other.close()


def test_episodes_end_where_the_collector_cuts_them() -> None:
    make_env = functools.partial(GymEnv, "CartPole-v1")
    with HTSCollector(
        [make_env], frames_per_batch=40, total_frames=40, seed=5, max_frames_per_traj=7
    ) as collector:
        (batch,) = collector
    replay = TorchRLReplay(make_env, 0, seed=5, max_frames_per_traj=7)
    replay.reset()
    for step in batch.unbind(1):
        after = replay.step(step)
        for key in ("observation", "truncated"):
            assert torch.equal(after[key], step["next", key]), key
    assert batch["next", "truncated"].any()


def test_another_seed_is_another_replay() -> None:
    first = []
    for seed in (5, 6):
        replay = TorchRLReplay(single, 0, seed=seed)
        first.append(replay.reset()["observation"])
    assert not torch.equal(*first)


class Loses(Transform):
    """It no longer knows where it is."""

    def _step(self, _: TensorDictBase, after: TensorDictBase) -> TensorDictBase:
        return after.set("observation", after["observation"] * math.nan)


def test_what_the_collector_refuses_is_refused() -> None:
    replay = TorchRLReplay(lambda: TransformedEnv(GymEnv("CartPole-v1"), Loses()), 0, seed=5)
    step = replay.reset().set("action", torch.tensor([[1, 0]]))
    with pytest.raises(InvalidValueError, match=r"the environment returned NaN in .*observation"):
        replay.step(step)


def test_what_is_no_environment_of_torchrl_is_refused() -> None:
    with pytest.raises(TypeError, match="plays a TorchRL environment, or a batch of them; its fac"):
        TorchRLReplay(functools.partial(gym.make, "CartPole-v1"), 0, seed=0)
