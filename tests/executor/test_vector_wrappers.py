"""Wrappers around a batch, and arrays that are used again: rows are those of single ones."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from vector_walks import MODES, K, Walk, assert_same, batch, bound, play, singles

from torchrl_hts._executor.gym_env import RowOptions
from torchrl_hts._executor.vector_env import VectorEnvironment
from torchrl_hts.errors import EnvError

CUT_OFF = RowOptions(2, True, (("action",),), ())


class Reusing(Walk):
    """Overwrites the array that it has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = np.zeros(3, np.float32)

    def _observation(self) -> Any:
        self.shown[:] = self.place
        return self.shown


@pytest.mark.parametrize("mode", MODES)
def test_environments_that_reuse_their_arrays(mode: AutoresetMode) -> None:
    """The last observation is not that of the reset that follows."""
    assert_same(play(singles(Reusing), [1] * K), play([batch(Reusing, mode)], [K]))


@pytest.mark.parametrize("mode", MODES)
def test_environments_that_reuse_their_arrays_below_a_wrapper(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([Reusing] * K, autoreset_mode=mode)
    same = gym.wrappers.vector.TransformReward(envs, lambda rewards: rewards)
    expected = play(singles(Reusing), [1] * K)
    assert_same(expected, play([VectorEnvironment(same, 0)], [K]))
    if mode == AutoresetMode.SAME_STEP:
        envs = SyncVectorEnv([Reusing] * K, autoreset_mode=mode)
        counted = gym.wrappers.vector.RecordEpisodeStatistics(envs)
        assert_same(expected, play([VectorEnvironment(counted, 0)], [K]))


class Quiet(Walk):
    """Without an info of its own."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {}

    def step(self, action: Any) -> Any:
        return *super().step(action)[:-1], {}


class TestWrappersAroundABatch:
    """They count for each environment, as if it were alone, or are refused."""

    def test_episodes_are_told_by_what_counts_them(self) -> None:
        options = RowOptions(0, True, (("action",),), (), info_keys=(("episode", "r"),))
        single = play(
            singles(lambda: gym.wrappers.RecordEpisodeStatistics(Quiet())), [1] * K, options
        )
        envs = SyncVectorEnv([Quiet] * K, autoreset_mode=AutoresetMode.SAME_STEP)
        counted = VectorEnvironment(gym.wrappers.vector.RecordEpisodeStatistics(envs), 0)
        assert_same(single, play([counted], [K], options))
        assert any(np.isfinite(written["next", "episode", "r"]).any() for written in single)

    @pytest.mark.parametrize(
        ("wrapper", "mode"),
        [
            ("RecordEpisodeStatistics", AutoresetMode.NEXT_STEP),
            ("RecordEpisodeStatistics", AutoresetMode.DISABLED),
            ("NormalizeReward", AutoresetMode.NEXT_STEP),
            ("NormalizeReward", AutoresetMode.DISABLED),
            ("NormalizeObservation", AutoresetMode.NEXT_STEP),  # gymnasium refuses the others
        ],
    )
    def test_what_would_forget_the_others_is_refused(
        self, wrapper: str, mode: AutoresetMode
    ) -> None:
        wrap = getattr(gym.wrappers.vector, wrapper)
        with pytest.raises(EnvError, match=rf"{wrapper} around a batch forgets.*wrappers=\["):
            VectorEnvironment(wrap(SyncVectorEnv([Walk] * 2, autoreset_mode=mode)), 0)
        VectorEnvironment(wrap(SyncVectorEnv([Walk], autoreset_mode=mode)), 0)
        inside = gym.make_vec(
            "CartPole-v1", 2, "sync", wrappers=[getattr(gym.wrappers, wrapper)],
            vector_kwargs={"autoreset_mode": mode},
        )  # fmt: skip
        VectorEnvironment(inside, 0)

    def test_it_is_refused_where_episodes_are_cut_off(self) -> None:
        envs = SyncVectorEnv([Walk] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        with pytest.raises(EnvError, match=r"to be cut off.*NormalizeReward around a batch"):
            bound(gym.wrappers.vector.NormalizeReward(envs), CUT_OFF)

    def test_envpool_may_be_wrapped(self) -> None:
        envpool = pytest.importorskip("envpool")
        envs = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2)
        doubled = gym.wrappers.vector.TransformReward(envs, lambda rewards: 2 * rewards)
        environment = VectorEnvironment(doubled, 0)
        assert (environment.description.num_envs, environment.takes_seeds) == (2, False)
