"""Wrappers around a batch, and arrays that are used again: rows are those of single ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from vector_walks import MODES, K, Walk, assert_same, batch, bound, play, singles

from torchrl_hts._executor.gym_env import RowOptions
from torchrl_hts._executor.vector_env import VectorEnvironment
from torchrl_hts.errors import EnvError, InvalidValueError

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


class Overwriting(gym.vector.VectorWrapper):
    """Has one array for what its environments see, with zeros of those that it doesn't reset."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.shown = np.zeros((K, 3), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        begun = (options or {}).get("reset_mask", np.ones(K, bool))
        fresh, infos = super().reset(seed=seed, options=options)
        self.shown[:] = np.where(begun[:, None], fresh, 0)
        return self.shown, infos

    def step(self, actions: Any) -> Any:
        self.shown[:], *others = super().step(actions)
        return (self.shown, *others)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_batches_that_reuse_their_array(mode: AutoresetMode) -> None:
    """What is written there where one begins anew is nothing that the others see."""
    same = Overwriting(SyncVectorEnv([Walk] * K, autoreset_mode=mode))
    assert_same(play(singles(), [1] * K), play([VectorEnvironment(same, 0)], [K]))


class Quiet(Walk):
    """Without an info of its own."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {}

    def step(self, action: Any) -> Any:
        return *super().step(action)[:-1], {}


class Far(gym.Env[Any, Any]):
    """Says what only the wrapper around its batch makes fit."""

    far = Box(-np.inf, np.inf, (), np.float64)
    observation_space = gym.spaces.Tuple((far, Box(-np.inf, np.inf, (), np.float32)))
    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        paid = 10**40 if self.t % 2 else np.float32(np.nan)
        return self._observation(), paid, self.t == 5, False, {}

    def _observation(self) -> Any:
        return np.float64(1e9 + self.t / 4), np.float64(np.nan)


class Said(gym.Env[Any, Any]):
    """Observes what it is given."""

    action_space = Discrete(3)
    observation_space = gym.spaces.Dict(
        text=gym.spaces.Text(3), room=Box(-np.inf, np.inf, (1,), np.float32)
    )

    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.seen, {}


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

    @pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
    @pytest.mark.parametrize(
        ("wrapper", "options"),
        [
            ("FlattenObservation", {}),
            ("FilterObservation", {"filter_keys": ["room"]}),
            ("ReshapeObservation", {"shape": (3, 1)}),
            ("DtypeObservation", {"dtype": np.float64}),
        ],
    )
    def test_they_may_change_the_space(
        self, wrapper: str, options: dict[str, Any], mode: AutoresetMode
    ) -> None:
        make = partial(Walk, nested=wrapper in ("FlattenObservation", "FilterObservation"))
        wrap = getattr(gym.wrappers, wrapper)
        expected = play(singles(lambda: wrap(make(), **options)), [1] * K)
        envs = SyncVectorEnv([make] * K, autoreset_mode=mode)
        wrapped = getattr(gym.wrappers.vector, wrapper)(envs, **options)
        assert_same(expected, play([VectorEnvironment(wrapped, 0)], [K]))

    def test_they_may_replace_what_no_batch_holds(self) -> None:
        """Observations of other kinds and data types, NaN, and rewards that are too large."""
        vector = gym.wrappers.vector
        envs: Any = SyncVectorEnv([Far] * K, autoreset_mode=AutoresetMode.DISABLED)
        envs = vector.TransformReward(envs, lambda rewards: np.nan_to_num(rewards) * 1e-40)
        envs = vector.TransformObservation(
            envs,
            lambda seen: np.nan_to_num(np.stack(seen, 1) - 1e9, nan=-1).astype(np.float32),
            single_observation_space=Box(-np.inf, np.inf, (2,), np.float32),
        )
        for written in play([VectorEnvironment(envs, 0)], [K]):
            seen, after = written["observation",], written["next", "observation"]
            assert (seen[..., 1] == -1).all()
            assert (after[..., 0] == seen[..., 0] + 0.25).all()
            assert set(np.unique(written["next", "reward"])) == {0, 1}

    def test_what_they_leave_is_converted_as_single_ones_are(self) -> None:
        """Also where another part of the space is no array."""
        seen = {"text": "a", "room": np.array([1e39])}
        wrapped = gym.wrappers.vector.FilterObservation(
            SyncVectorEnv([partial(Said, seen)]), ["room"]
        )
        with pytest.raises(InvalidValueError, match=r"1e\+39"):
            bound(wrapped)[0].reset([0], 0)

    def test_a_list_of_infos_is_refused(self) -> None:
        told = gym.wrappers.vector.DictInfoToList(SyncVectorEnv([Walk] * K))
        with pytest.raises(EnvError, match=r"DictInfoToList.*leave that wrapper out"):
            VectorEnvironment(told, 0)

    def test_envpool_may_be_wrapped(self) -> None:
        envpool = pytest.importorskip("envpool")
        envs = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2)
        doubled = gym.wrappers.vector.TransformReward(envs, lambda rewards: 2 * rewards)
        environment = VectorEnvironment(doubled, 0)
        assert (environment.description.num_envs, environment.takes_seeds) == (2, False)
