"""A batch of environments against its environments one by one: the same rows, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from rows import WRITES_ALL, memory_for, play_round
from vector_engines import Counting, WithMask
from vector_walks import (
    INDEX,
    MODES,
    K,
    Walk,
    assert_same,
    batch,
    bound,
    indices,
    play,
    singles,
)

from torchrl_hts._executor.gym_env import Carried, GymEnvironment, RowOptions
from torchrl_hts._executor.vector_env import VectorEnvironment
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array, Field
from torchrl_hts.errors import CannotSaveError, EnvError, InvalidValueError


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_frames", [0, 4])
@pytest.mark.parametrize("nested", [False, True])
def test_a_batch_writes_what_its_environments_write(
    mode: AutoresetMode, max_frames: int, nested: bool
) -> None:
    """True last observations, first ones of the next episode, flags, ids, infos, states."""
    options = RowOptions(
        max_frames, True, (("action",), ("next", "h")), (Carried(("h",), ("next", "h"), 0.5),),
        info_keys=(("lives",), ("episode", "r")), write_is_init=True,
    )  # fmt: skip
    more = (Field(("h",), (2,), "float32"), Field(("next", "h"), (2,), "float32"))

    def act(t: int, rng: np.random.Generator) -> dict[Key, Array]:
        return indices(t, rng) | {("next", "h"): rng.normal(size=(K, 2))}

    def make() -> Walk:
        return Walk(nested=nested)

    expected = play(singles(make), [1] * K, options, act=act, more=more)
    assert_same(expected, play([batch(make, mode)], [K], options, act=act, more=more))
    ends = sum(written["next", "done"].sum() for written in expected)
    assert ends > 20, "or nothing is shown of episodes"
    assert sum(written["next", "truncated"].sum() for written in expected) > 3


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_different_sizes_beside_single_environments(mode: AutoresetMode) -> None:
    mixed = [
        VectorEnvironment(SyncVectorEnv([Walk] * 2, autoreset_mode=mode), 0),
        GymEnvironment(Walk(), 1),
        VectorEnvironment(SyncVectorEnv([Walk], autoreset_mode=mode), 2),
        GymEnvironment(Walk(), 3),
    ]
    assert_same(play(singles(), [1] * K), play(mixed, [2, 1, 1, 1]))


def test_without_the_observation_of_the_next_step() -> None:
    options = RowOptions(0, False, (("action",),), ())
    assert_same(play(singles(), [1] * K, options), play([batch()], [K], options))


@pytest.mark.parametrize(
    ("space", "field", "draw"),
    [
        (Discrete(3), Field(("action",), (3,), "bool"), lambda g: np.eye(3)[g.integers(3, size=K)]),
        (Discrete(3, start=-1), INDEX, lambda g: g.integers(3, size=K)),
        (Discrete(1, start=2), Field(("action",), (1,), "int64"), lambda g: np.ones((K, 1))),
        (MultiDiscrete([2, 4]), Field(("action",), (2,), "int64"),
         lambda g: g.integers([2, 4], size=(K, 2))),
        (MultiDiscrete([2, 3]), Field(("action",), (5,), "bool"),
         lambda g: np.hstack([np.eye(n)[g.integers(n, size=K)] for n in (2, 3)])),
        (MultiBinary(4), Field(("action",), (4,), "float32"), lambda g: g.integers(2, size=(K, 4))),
        (Box(-9, 9, (2, 1), np.float64), Field(("action",), (2, 1), "float32"),
         lambda g: g.normal(size=(K, 2, 1))),
    ],
)  # fmt: skip
def test_actions_of_every_kind(space: Any, field: Field, draw: Any) -> None:
    def act(t: int, rng: np.random.Generator) -> dict[Key, Array]:
        return {("action",): draw(rng)}

    def make() -> Walk:
        return Walk(space)

    written = play(singles(make), [1] * K, action=field, act=act)
    assert_same(written, play([batch(make)], [K], action=field, act=act))


def test_actions_of_a_dict() -> None:
    space = gym.spaces.Dict({"turn": Discrete(3), "push": Box(-1, 1, (1,), np.float32)})
    turn, push = Field(("action", "turn"), (), "int64"), Field(("action", "push"), (1,), "float32")

    class Told(Walk):
        def step(self, action: Any) -> Any:
            return super().step(int(action["turn"]) + float(action["push"][0]))

    def act(t: int, rng: np.random.Generator) -> dict[Key, Array]:
        return {turn.key: rng.integers(3, size=K), push.key: rng.normal(size=(K, 1))}

    def make() -> Told:
        return Told(space)

    written = play(singles(make), [1] * K, action=turn, act=act, more=(push,))
    assert_same(written, play([batch(make)], [K], action=turn, act=act, more=(push,)))


def test_an_action_that_the_space_does_not_have_is_named() -> None:
    with pytest.raises(InvalidValueError, match=r"takes the indices 0 to \[2, 2, 2, 2, 2\]"):
        play([batch()], [K], act=lambda t, rng: {("action",): np.full(K, 3)})


class TestSaving:
    def test_a_batch_goes_on_where_it_was_saved(self) -> None:
        for mode in MODES:
            memory = memory_for(Walk().observation_space, INDEX, [K])
            first, second = batch(mode=mode), batch(mode=mode)
            first.bind(memory, WRITES_ALL)
            first.reset(range(K), 0)
            rng = np.random.default_rng(0)
            before, ahead = ([indices(t, rng) for t in range(5)] for _ in range(2))
            play_round([first], memory, before.__getitem__)
            state = first.save()
            on = [play_round([first], memory, ahead.__getitem__) for _ in range(3)]
            second.bind(memory, WRITES_ALL)
            second.restore(state)
            again = [play_round([second], memory, ahead.__getitem__) for _ in range(3)]
            assert_same(on, again)

    def test_what_a_wrapper_around_all_keeps_can_not_be_saved(self) -> None:
        envs = SyncVectorEnv([Walk] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        env = gym.wrappers.vector.RecordEpisodeStatistics(envs)
        with pytest.raises(CannotSaveError, match=r"SyncVectorEnv, or single environments"):
            VectorEnvironment(env, 0).save()

    def test_a_state_of_another_number_of_environments_is_refused(self) -> None:
        memory = memory_for(Walk().observation_space, INDEX, [K])
        one = batch()
        one.bind(memory, WRITES_ALL)
        one.reset(range(K), 0)
        with pytest.raises(CannotSaveError, match="batch of 5 environments, and this one has 2"):
            batch(k=2).restore(one.save())
        with pytest.raises(CannotSaveError, match="of a single environment"):
            batch(k=2).restore(b"anything else")


class TestEngines:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: Counting(AutoresetMode.SAME_STEP),
            *(lambda m=m: WithMask(m) for m in MODES[::2]),
        ],
    )
    def test_an_engine_of_arrays(self, make: Any) -> None:
        environment, memory = bound(make())
        environment.reset([7, 8], 0)
        written = play_round([environment], memory, lambda t: {("action",): np.zeros(2)})
        assert written["observation",][:, :, 0].tolist() == [[7] * 5, [8] * 5]
        assert written["observation",][0, :, 1].tolist() == [0, 1, 2, 0, 1]
        assert written["next", "observation"][0, :, 1].tolist() == [1, 2, 3, 1, 2]
        assert written["collector", "traj_ids"].tolist() == [[0, 0, 0, 2, 2], [1, 1, 1, 3, 3]]

    def test_one_that_would_waste_a_row_is_refused(self) -> None:
        with pytest.raises(EnvError, match=r"waste a row.*make_vec.*AutoresetMode\.SAME_STEP"):
            VectorEnvironment(Counting(AutoresetMode.NEXT_STEP), 0)
        env = gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
        with pytest.raises(EnvError, match="CartPoleVectorEnv begins an episode"):
            VectorEnvironment(env, 0)

    def test_one_that_can_not_be_cut_off_is_refused_where_it_is_to_be(self) -> None:
        options = RowOptions(2, True, (("action",),), ())
        with pytest.raises(EnvError, match=r"Counting can't begin some.*takes no opt"):
            bound(Counting(AutoresetMode.SAME_STEP), options)

    def test_one_that_takes_one_seed_gets_the_first_and_says_so(self) -> None:
        environment, _ = bound(Counting(AutoresetMode.SAME_STEP, takes_seeds=False))
        with pytest.warns(UserWarning, match="Counting takes one seed for all"):
            environment.reset([7, 8], 0)
        environment.reset([9, 10], 0)
        environment.write_observation(0, 0)
        assert environment.env.current[:, 0].tolist() == [9, 9]

    def test_numbers_of_the_next_episode_are_not_those_of_the_last_step(self) -> None:
        class Told(Counting):
            def step(self, actions: Any) -> Any:
                *outcome, infos = super().step(actions)
                return *outcome, infos | {"lives": np.array([3, 4])}

        options = RowOptions(0, True, (("action",),), (), info_keys=(("lives",),))
        environment, memory = bound(Told(AutoresetMode.SAME_STEP), options)
        environment.reset([7, 8], 0)
        written = play_round([environment], memory, lambda t: {("action",): np.zeros(2)})
        ended = (
            written["next", "done"][..., 0]
            if written["next", "done"].ndim == 3
            else written["next", "done"]
        )
        lives = written["next", "lives"].reshape(ended.shape)
        assert np.isnan(lives[ended]).all()
        assert ended.any()
        assert (lives[0][~ended[0]] == 3).all()

    def test_last_observations_that_are_missing_are_asked_for(self) -> None:
        class Silent(Counting):
            def step(self, actions: Any) -> Any:
                return *super().step(actions)[:4], {}

        environment, memory = bound(Silent(AutoresetMode.SAME_STEP))
        environment.reset([7, 8], 0)
        with pytest.raises(InvalidValueError, match="lacks 'final_obs'"):
            play_round([environment], memory, lambda t: {("action",): np.zeros(2)})

    @pytest.mark.parametrize(
        ("rewards", "error"),
        [
            (np.zeros(3), r"rewards of shape \(3,\)"),
            ([None, None], "data type object"),
            (np.array([0, np.nan]), "the reward nan"),
            (np.array([0, 1e300]), "which ends at"),
        ],
    )
    def test_rewards_that_are_none(self, rewards: Any, error: str) -> None:
        environment, memory = bound(WithMask(AutoresetMode.NEXT_STEP))
        environment.reset([7, 8], 0)
        environment.env.rewards = rewards
        with pytest.raises(InvalidValueError, match=error):
            play_round([environment], memory, lambda t: {("action",): np.zeros(2)})

    @pytest.mark.parametrize(
        ("value", "error"),
        [(np.nan, r"NaN in 'observation', at \[\[1, 0\]\]"), (1e39, "its observation space says")],
    )
    def test_observations_that_are_none(self, value: float, error: str) -> None:
        class Broken(WithMask):
            def reset(self, **kwargs: Any) -> Any:
                observations, infos = super().reset(**kwargs)
                observations[1, 0] = value
                return observations, infos

        env = Broken(AutoresetMode.NEXT_STEP)
        if value > 1:
            env.single_observation_space = Box(-1, np.inf, (2,), np.float32)
            env.observation_space = batch_space(env.single_observation_space, 2)
        environment, _ = bound(env)
        with pytest.raises(InvalidValueError, match=error):
            environment.reset([0, 0], 0)

    def test_an_empty_batch_and_one_of_different_spaces_are_refused(self) -> None:
        with pytest.raises(ValueError, match="num_envs=0; expected a batch of at least one"):
            VectorEnvironment(Counting(AutoresetMode.SAME_STEP, k=0), 0)
        spaces = [Box(0, high, (3,), np.float32) for high in (1, 2)]

        class Bounded(Walk):
            def __init__(self, space: Any) -> None:
                super().__init__()
                self.observation_space = space

        makers = [lambda space=space: Bounded(space) for space in spaces]
        with pytest.raises(ValueError, match="expected a batch of 2 environments with"):
            VectorEnvironment(SyncVectorEnv(makers, observation_mode="different"), 0)

    def test_environments_in_processes_of_their_own(self) -> None:
        env = AsyncVectorEnv([Walk] * K, autoreset_mode=AutoresetMode.SAME_STEP)
        environment = VectorEnvironment(env, 0)
        try:
            assert_same(play(singles(), [1] * K), play([environment], [K]))
            with pytest.raises(CannotSaveError, match="AsyncVectorEnv has no way"):
                environment.save()
        finally:
            environment.close()

    @pytest.mark.parametrize("k", [1, 2])
    def test_processes_that_would_begin_every_episode_twice_are_refused(self, k: int) -> None:
        env = AsyncVectorEnv([Walk] * k, shared_memory=False)
        try:
            with pytest.raises(EnvError, match=r"reset once more.*DISABLED, or with shared_mem"):
                VectorEnvironment(env, 0)
        finally:
            env.close()

    def test_processes_without_shared_memory(self) -> None:
        mode = AutoresetMode.DISABLED
        environment = VectorEnvironment(
            AsyncVectorEnv([Walk] * K, shared_memory=False, autoreset_mode=mode), 0
        )
        try:
            assert_same(play(singles(), [1] * K), play([environment], [K]))
        finally:
            environment.close()

    def test_rewards_are_those_before_the_reset(self) -> None:
        """What an evaluation adds up, of an engine that writes to its own array."""

        class Clearing(WithMask):
            def reset(self, **kwargs: Any) -> Any:
                self.rewards[:] = 0
                return super().reset(**kwargs)

            def step(self, actions: Any) -> Any:
                self.rewards[:] = self.current[:, 1] + 1
                return super().step(actions)

        environment, memory = bound(Clearing(AutoresetMode.DISABLED))
        environment.reset([7, 8], 0)
        memory.fields(0)["action",][:] = 0
        paid = []
        for t in range(4):
            environment.step(0, t)
            paid.append(environment.rewards.tolist())
        assert paid == [[1, 1], [2, 2], [3, 3], [1, 1]]

    @pytest.mark.filterwarnings("ignore:.*precision lowered")
    def test_envpool(self) -> None:
        """Its resets return those that were begun alone."""
        envpool = pytest.importorskip("envpool")
        environment, memory = bound(
            envpool.make_gymnasium("CartPole-v1", num_envs=3, seed=5, max_episode_steps=9)
        )
        with pytest.warns(UserWarning, match="takes its seed where it is made"):
            environment.reset([7, 8, 9], 0)
        rng = np.random.default_rng(0)
        check_episodes(environment, memory, lambda t: {("action",): rng.integers(2, size=3)})
        with pytest.raises(ValueError, match="leave its batch_size out"):
            VectorEnvironment(envpool.make_gymnasium("CartPole-v1", num_envs=3, batch_size=2), 0)

    def test_ales_own(self) -> None:
        """The same in each mode, from seeds of each game."""
        ale_py = pytest.importorskip("ale_py.vector_env")
        found = []
        for mode, first in ((MODES[0], 1), (MODES[1], 1), (MODES[1], 2)):
            games = ale_py.AtariVectorEnv(
                "pong", 2, autoreset_mode=mode, max_num_frames_per_episode=24, img_height=12,
                img_width=12, noop_max=9, repeat_action_probability=0.5, num_threads=1,
            )  # fmt: skip
            environment, memory = bound(games)
            environment.reset([first, 2**32 - 1], 0)
            rng = np.random.default_rng(0)

            def act(t: int, rng: np.random.Generator = rng) -> dict[Key, Array]:
                return {("action",): rng.integers(6, size=2)}

            found.append(check_episodes(environment, memory, act))
        assert_same(found[0], found[1])
        one, other = (rounds[0]["observation",] for rounds in found[1:])
        assert (one[0] != other[0]).any()
        assert (one[1] == other[1]).all()


def check_episodes(
    environment: Any, memory: Any, act: Callable[[int], dict[Key, Array]]
) -> list[dict[Key, Array]]:
    """Each observation but the last of an episode is what the next step begins with."""
    rounds = [play_round([environment], memory, act) for _ in range(6)]
    written = {key: np.concatenate([r[key] for r in rounds], 1) for key in rounds[0]}
    done = written["next", "done"][:, :-1, 0]
    root, after = written["observation",][:, 1:], written["next", "observation"][:, :-1]
    assert (root[~done] == after[~done]).all()
    assert done.sum() >= len(done)
    assert all((one != other).any() for one, other in zip(root[done], after[done], strict=True))
    return rounds
