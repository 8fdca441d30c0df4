"""EpisodeReturns against a slow reference that adds up one reward at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torchrl.collectors.utils import split_trajectories

from torchrl_hts._reports.episodes import EpisodeReturns


def make_batch(reward: Tensor, done: Tensor) -> TensorDict:
    return TensorDict(
        {"next": {"reward": reward.unsqueeze(-1), "done": done.unsqueeze(-1)}},
        batch_size=reward.shape,
    )


def reference(reward: Tensor, done: Tensor) -> tuple[list[float], list[int]]:
    """Returns and lengths of all episodes that end in ``[N, T]``, by step and environment."""
    num_envs, num_steps = reward.shape
    total, length = [0.0] * num_envs, [0] * num_envs
    returns, lengths = [], []
    for step in range(num_steps):
        for env in range(num_envs):
            total[env] += float(reward[env, step])
            length[env] += 1
            if done[env, step]:
                returns.append(total[env])
                lengths.append(length[env])
                total[env], length[env] = 0.0, 0
    return returns, lengths


@settings(max_examples=50, deadline=None)
@given(
    num_envs=st.integers(1, 5),
    steps_per_batch=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    end_probability=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_any_cut_into_batches_gives_the_reference(
    num_envs: int, steps_per_batch: list[int], end_probability: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_envs, sum(steps_per_batch))
    reward = torch.randint(-3, 4, shape, generator=generator).float()
    done = torch.rand(shape, generator=generator) < end_probability
    returns = EpisodeReturns(window=1_000)
    ended: list[float] = []
    for reward_part, done_part in zip(
        reward.split(steps_per_batch, 1), done.split(steps_per_batch, 1), strict=True
    ):
        ended += returns.update(make_batch(reward_part, done_part))

    expected, expected_lengths = reference(reward, done)
    assert ended == expected
    assert returns.count == len(expected)
    if expected:
        assert returns.mean == pytest.approx(sum(expected) / len(expected))
        assert returns.min == min(expected)
        assert returns.max == max(expected)
        assert returns.mean_length == pytest.approx(sum(expected_lengths) / len(expected))
    else:
        assert all(map(math.isnan, (returns.mean, returns.min, returns.max, returns.mean_length)))


def test_averages_are_over_the_most_recent_episodes() -> None:
    returns = EpisodeReturns(window=2)
    done = torch.ones(1, 3, dtype=torch.bool)
    assert returns.update(make_batch(torch.tensor([[1.0, 10.0, 20.0]]), done)) == [1.0, 10.0, 20.0]
    assert returns.count == 3
    assert (returns.mean, returns.min, returns.max) == (15.0, 10.0, 20.0)


def test_long_episodes_keep_their_precision() -> None:
    returns = EpisodeReturns()
    steps, batches = 1_000, 20
    done = torch.zeros(1, steps, dtype=torch.bool)
    for _ in range(batches - 1):
        returns.update(make_batch(torch.full((1, steps), 0.1), done))
    done[0, -1] = True
    (total,) = returns.update(make_batch(torch.full((1, steps), 0.1), done))
    assert total == pytest.approx(steps * batches * float(torch.tensor(0.1)), rel=1e-12)


def test_the_batch_is_only_read() -> None:
    reward, done = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    batch = make_batch(reward.clone(), done.clone())
    EpisodeReturns().update(batch)
    assert torch.equal(batch["next", "reward"].squeeze(-1), reward)
    assert torch.equal(batch["next", "done"].squeeze(-1), done)


def test_bad_input_says_what_to_change() -> None:
    returns = EpisodeReturns()
    flat = make_batch(torch.ones(1, 6), torch.ones(1, 6, dtype=torch.bool)).reshape(-1)
    with pytest.raises(ValueError, match=r"\[environments, steps\]"):
        returns.update(flat)
    returns.update(make_batch(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)))
    with pytest.raises(ValueError, match="2 environments as before, and got 3"):
        returns.update(make_batch(torch.ones(3, 3), torch.ones(3, 3, dtype=torch.bool)))
    for window, error in ((0, ValueError), (None, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"^window must be "):
            EpisodeReturns(window)  # type: ignore[arg-type]
    assert math.isnan(EpisodeReturns(np.int64(3)).mean)
    for nothing in (None, {}):
        with pytest.raises(TypeError, match="expected a batch, which is a TensorDict, and got"):
            returns.update(nothing)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state_dict must be a mapping, got NoneType"):
        returns.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state_dict lacks count, lengths, open_"):
        returns.load_state_dict({})


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("set_truncated", [False, True])
def test_ends_are_those_steps_whose_flag_is_not_0(dtype: torch.dtype, set_truncated: bool) -> None:
    done = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]])
    batch = make_batch(torch.ones(2, 4), done.to(dtype))
    batch["next", "terminated"] = batch["next", "done"]
    batch["next", "won"] = torch.arange(8.0).view(2, 4, 1)
    batch["collector", "traj_ids"] = torch.zeros(2, 4, dtype=torch.int64)
    returns = EpisodeReturns(info_keys=["won"], set_truncated=set_truncated)
    assert returns.update(batch) == [2.0, 4.0]
    assert returns.info_means["won"] == (1 + 7) / 2


def test_a_batch_that_is_refused_changes_nothing() -> None:
    returns = EpisodeReturns(info_keys=["won"])
    batch = make_batch(torch.ones(1, 2), torch.tensor([[False, False]]))
    with pytest.raises(KeyError, match="won"):
        returns.update(batch)
    batch["next", "won"] = torch.ones(1, 2, 1)
    batch["next", "done"][:, -1] = True
    assert returns.update(batch) == [2.0]


def test_what_was_added_up_of_an_episode_that_never_ended_is_dropped() -> None:
    def batch(first_id: int) -> TensorDict:
        trajectory = torch.tensor([[first_id] * 3, [1] * 3])
        done = torch.zeros(2, 3, 1, dtype=torch.bool)
        done[:, -1] = first_id != 0
        data = {"next": {"reward": torch.ones(2, 3, 1), "done": done}}
        return TensorDict({**data, "collector": {"traj_ids": trajectory}}, [2, 3])

    before, after = EpisodeReturns(), EpisodeReturns()
    before.update(batch(0))
    after.load_state_dict(before.state_dict())
    assert after.update(batch(2)) == [3.0, 6.0]  # the first environment has begun anew
    assert (after.min_length, after.max_length) == (3, 6)


def test_a_state_goes_on() -> None:
    before, after = EpisodeReturns(window=2), EpisodeReturns(window=2)
    done = torch.tensor([[[False], [True], [False]]])
    batch = TensorDict({"next": {"reward": torch.ones(1, 3, 1), "done": done}}, [1, 3])
    before.update(batch)
    after.load_state_dict(before.state_dict())
    assert after.update(batch) == before.update(batch) == [3.0]
    assert (after.count, after.mean) == (before.count, before.mean) == (2, 2.5)


@settings(max_examples=50, deadline=None)
@given(
    steps_per_batch=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    known=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 2**31),
    resumes=st.booleans(),
)
def test_the_last_number_of_each_episode_counts(
    steps_per_batch: list[int], known: float, seed: int, resumes: bool
) -> None:
    """However the steps are cut into batches, and a state is taken between two of them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, sum(steps_per_batch))
    values = torch.randint(-3, 4, shape, generator=generator).double()
    values[torch.rand(shape, generator=generator) >= known] = math.nan
    done = torch.rand(shape, generator=generator) < 0.3
    returns = EpisodeReturns(window=1_000, info_keys=["won", ("episode", "r")])
    parts = (tensor.split(steps_per_batch, 1) for tensor in (values, done))
    for value_part, done_part in zip(*parts, strict=True):
        batch = make_batch(torch.zeros(value_part.shape), done_part)
        batch["next", "won"] = value_part.unsqueeze(-1)
        batch["next", "episode", "r"] = 2 * value_part.unsqueeze(-1)
        returns.update(batch)
        if resumes:
            state = returns.state_dict()
            returns = EpisodeReturns(window=1_000, info_keys=[("episode", "r"), "won"])
            returns.load_state_dict(state)

    expected, last = [], [math.nan] * 3
    for step in range(shape[1]):
        for env in range(3):
            value = float(values[env, step])
            last[env] = last[env] if math.isnan(value) else value
            if done[env, step]:
                expected.append(last[env])
                last[env] = math.nan
    numbers = [value for value in expected if not math.isnan(value)]
    means = returns.info_means
    assert means.keys() == {"won", ("episode", "r")}
    if numbers:
        assert means["won"] == pytest.approx(sum(numbers) / len(numbers))
        assert means["episode", "r"] == pytest.approx(2 * sum(numbers) / len(numbers))
    else:
        assert all(map(math.isnan, means.values()))


def test_numbers_of_an_episode_that_never_ended_are_dropped() -> None:
    def batch(first_id: int, won: float) -> TensorDict:
        done = torch.tensor([[[False], [first_id == 1]]])
        data = {"reward": torch.ones(1, 2, 1), "done": done, "won": torch.full((1, 2, 1), won)}
        ids = torch.full((1, 2), first_id)
        return TensorDict({"next": data, "collector": {"traj_ids": ids}}, [1, 2])

    returns = EpisodeReturns(info_keys=["won"])
    returns.update(batch(0, 1.0))
    returns.update(batch(1, math.nan))
    assert returns.count == 1
    assert math.isnan(returns.info_means["won"])


def test_a_state_of_another_version_and_other_keys() -> None:
    returns = EpisodeReturns(info_keys=["won"])
    state = EpisodeReturns().state_dict()
    returns.load_state_dict(state)
    del state["infos"]
    returns.load_state_dict(state)
    assert math.isnan(returns.info_means["won"])


def test_batches_without_the_numbers_are_refused() -> None:
    batch = make_batch(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(KeyError, match=r"no \('next', 'won'\): give the collector info_keys"):
        EpisodeReturns(info_keys=["won"]).update(batch)
    with pytest.raises(TypeError, match="info_keys must be a list"):
        EpisodeReturns(info_keys="won")


def test_several_rewards_of_a_step_are_refused() -> None:
    batch = make_batch(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    batch["next", "reward"] = torch.zeros(2, 3, 2)
    with pytest.raises(ValueError, match=r"one reward of each step.*got \[2, 3, 2\]"):
        EpisodeReturns().update(batch)


def test_several_agents_are_refused_in_a_sentence() -> None:
    batch = TensorDict({"next": {"agents": {"reward": torch.zeros(2, 3, 4, 1)}}}, [2, 3])
    batch["next", "done"] = torch.zeros(2, 3, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"one reward of each step.*got none at .*add them up"):
        EpisodeReturns().update(batch)


def test_split_trajectories_are_refused() -> None:
    batch = make_batch(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    ids = torch.tensor([[0, 0, 1], [2, 2, 2]])
    batch["collector", "traj_ids"] = ids
    with pytest.raises(ValueError, match=r"split trajectories\. Leave split_trajs out"):
        EpisodeReturns().update(split_trajectories(batch, prefix="collector"))
    EpisodeReturns().update(batch)


def test_infinite_returns_are_averaged() -> None:
    returns = EpisodeReturns()
    done = torch.ones(1, 2, dtype=torch.bool)
    returns.update(make_batch(torch.tensor([[math.inf, -math.inf]]), done))
    assert math.isnan(returns.mean)
    assert (returns.min, returns.max, returns.mean_length) == (-math.inf, math.inf, 1.0)


@settings(max_examples=50, deadline=None)
@given(
    steps_per_batch=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    seed=st.integers(0, 2**31),
    resumes=st.booleans(),
)
def test_ends_of_rows_are_no_ends_of_episodes(
    steps_per_batch: list[int], seed: int, resumes: bool
) -> None:
    """With set_truncated, whether an episode ended by itself, or was truncated on a row's end."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, sum(steps_per_batch))
    reward = torch.randint(-3, 4, shape, generator=generator).float()
    terminated, truncated = (torch.rand(shape, generator=generator) < 0.2 for _ in range(2))
    truncated[:, -1] = False  # of the last step nothing more would be heard
    ended = terminated | truncated
    ids = ended.long().cumsum(1) - ended.long()
    returns = EpisodeReturns(window=1_000, info_keys=["won"], set_truncated=True)
    found: list[float] = []
    parts = (each.split(steps_per_batch, 1) for each in (reward, terminated, truncated, ids))
    for rewards, ends, cuts, numbers in zip(*parts, strict=True):
        marked = ends | cuts
        marked[:, -1] = True
        batch = make_batch(rewards, marked)
        batch["next", "terminated"] = ends.unsqueeze(-1)
        batch["next", "won"] = rewards.unsqueeze(-1)
        batch["collector", "traj_ids"] = numbers
        found += returns.update(batch)
        if resumes:
            state = returns.state_dict()
            returns = EpisodeReturns(window=1_000, info_keys=["won"], set_truncated=True)
            returns.load_state_dict(state)
    expected, lengths = reference(reward, ended)
    assert sorted(found) == sorted(expected)
    assert returns.count == len(expected)
    if expected:
        assert returns.mean_length == pytest.approx(sum(lengths) / len(lengths))
        won = reward[ended].mean().item()
        assert returns.info_means["won"] == pytest.approx(won, abs=1e-6)


def test_ends_of_rows_need_the_trajectories() -> None:
    batch = make_batch(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="set_truncated=True needs"):
        EpisodeReturns(set_truncated=True).update(batch)
