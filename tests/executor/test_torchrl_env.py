"""A batch of TorchRL environments against its environments one by one: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from rows import assert_equal_bits, play_round
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import (
    Compose,
    GymEnv,
    GymWrapper,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    default_info_dict_reader,
)
from torchrl_environments import Clocks, Square

from torchrl_hts._executor.gym_env import Carried, RowOptions
from torchrl_hts._executor.torchrl_env import TorchRLEnvironment
from torchrl_hts._executor.torchrl_play import TorchRLPlay, torchrl_observations
from torchrl_hts._rounds.entries import leaves
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array, Field, Layout, SharedMemory
from torchrl_hts._rounds.slots import field_of
from torchrl_hts.errors import EnvError, InvalidValueError

LENGTHS = (2, 5, 3, 4)
K, ROUNDS = len(LENGTHS), 6
ACTION: Key = ("action",)
TRAJECTORY = Field(("collector", "traj_ids"), (), "int64")

Act = Callable[[np.random.Generator], dict[Key, Array]]


def play(
    environments: list[TorchRLEnvironment],
    *,
    action: Key = ACTION,
    act: Act | None = None,
    carried: tuple[Carried, ...] = (),
    more: tuple[Field, ...] = (),
) -> list[dict[Key, Array]]:
    """Some rounds from new episodes on."""
    one = environments[0].description
    fields = [field_of(key, value, 0) for key, value in leaves(one.transition)]
    units = tuple(environment.description.num_envs for environment in environments)
    layout = Layout(K, 5, 0, 1, (*fields, TRAJECTORY, *more), (),
                    units=() if set(units) == {1} else units)  # fmt: skip
    memory = SharedMemory(SharedMemory.create_fd(), layout)
    options = RowOptions(0, True, (action, *(field.key for field in more)), carried)
    seeds = iter(range(100, 100 + K))
    for environment, size in zip(environments, units, strict=True):
        environment.bind(memory, options)
        own = [next(seeds) for _ in range(size)]
        environment.reset(own if layout.units else own[0], 0)
    rng = np.random.default_rng(0)
    shape = one.transition.get(action).shape

    def indices(rng: np.random.Generator) -> dict[Key, Array]:
        return {action: rng.integers(2, size=(K, *shape))}

    made = act or indices
    return [play_round(environments, memory, lambda t: made(rng)) for _ in range(ROUNDS)]


def environments(*envs: Any, max_frames: int = 0) -> list[TorchRLEnvironment]:
    return [
        TorchRLEnvironment(env, index, max_frames_per_traj=max_frames)
        for index, env in enumerate(envs)
    ]


def alone(num_agents: int = 0) -> list[Any]:
    return [Clocks(length, alone=True, num_agents=num_agents) for length in LENGTHS]


def assert_same(one: list[dict[Key, Array]], other: list[dict[Key, Array]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert_equal_bits(mine, theirs)
    assert sum(written["next", "done"].sum() for written in one) > 8, "or episodes are not shown"


@pytest.mark.parametrize("max_frames", [0, 3])
def test_a_batch_writes_what_its_environments_write(max_frames: int) -> None:
    """True last observations, first ones of the next episode, flags, ids."""
    one = play(environments(*alone(), max_frames=max_frames))
    assert_same(one, play(environments(Clocks(*LENGTHS), max_frames=max_frames)))
    last = one[0]["next", "observation"][0, 1]  # of an episode of two steps
    first = one[0]["observation",][0, 2]
    assert (last[:2].tolist(), first.tolist()) == ([1, 2], [2, 0, 0])


def test_batches_of_different_sizes_beside_single_environments() -> None:
    mixed = environments(Clocks(2, 5), Clocks(3, alone=True), Clocks(4))
    assert_same(play(environments(*alone())), play(mixed))


def test_a_group_of_agents() -> None:
    action: Key = ("agents", "action")
    one = play(environments(*alone(num_agents=2)), action=action)
    assert_same(one, play(environments(Clocks(*LENGTHS, num_agents=2)), action=action))
    assert one[0]["next", "agents", "reward"].shape == (K, 5, 2, 1)


def test_an_agent_that_is_out_does_not_end_its_environments_episode() -> None:
    """TorchRL begins an environment anew by the flag at its root, where there is one."""

    class Out(Clocks):
        def __init__(self, *lengths: int, **kwargs: Any) -> None:
            super().__init__(*lengths, num_agents=2, **kwargs)
            own = self.full_done_spec["done"].clone().unsqueeze(-2).expand(*self.members, 1)
            self.full_done_spec = self.full_done_spec.clone().update(
                {"agents": self._spec("done", own)["agents"]}
            )

        def _step(self, tensordict: Any) -> Any:
            told = super()._step(tensordict)
            told["agents", "done"] = torch.ones(*self.members, 1, dtype=torch.bool)
            return told

    action: Key = ("agents", "action")
    for envs in ([Out(9, alone=True) for _ in range(K)], [Out(9, 9, 9, 9)]):
        written = play(
            environments(*envs), action=action, act=lambda rng: {action: np.zeros((K, 2))}
        )
        assert written[0]["collector", "traj_ids"].tolist() == [[row] * 5 for row in range(K)]


def test_what_the_policy_carries_begins_anew_with_each_episode() -> None:
    carried = (Carried(("h",), ("next", "h"), 0.5),)
    more = (Field(("h",), (2,), "float32"), Field(("next", "h"), (2,), "float32"))

    def act(rng: np.random.Generator) -> dict[Key, Array]:
        return {ACTION: rng.integers(2, size=K), ("next", "h"): rng.normal(size=(K, 2))}

    one = play(environments(*alone()), act=act, carried=carried, more=more)
    other = play(environments(Clocks(*LENGTHS)), act=act, carried=carried, more=more)
    assert_same(one, other)
    assert (one[0]["h",][0, 2] == 0.5).all()


class TestSerialEnv:
    """Whose environments are at hand, and so each has its own seed."""

    make = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)

    def test_is_its_environments_with_their_seeds(self) -> None:
        def transformed(env: Any) -> Any:
            return TransformedEnv(env, Compose(RewardSum(), StepCounter(max_steps=12)))

        one = play(environments(*(transformed(self.make()) for _ in range(K))))
        other = play(environments(transformed(SerialEnv(K, self.make))))
        for mine, theirs in zip(one, other, strict=True):
            assert_equal_bits(mine, theirs)
        assert one[-1]["collector", "traj_ids"].max() >= K
        starts = one[0]["observation",][:, 0]
        assert len(np.unique(starts, axis=0)) == K

    def test_a_reward_that_would_be_converted_away_is_told_of(self) -> None:
        class Large(gym.Env[Any, Any]):
            observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
            action_space = gym.spaces.Discrete(2)

            def reset(self, *, seed: Any = None, options: Any = None) -> Any:
                return np.zeros(2, np.float32), {}

            def step(self, action: Any) -> Any:
                return np.zeros(2, np.float32), 1e39, False, False, {}

        make = partial(GymWrapper, categorical_action_encoding=True)
        env = SerialEnv(K, lambda: make(Large()))
        with pytest.raises(InvalidValueError, match="which ends at"):
            play(environments(env))


def test_a_batch_that_takes_one_seed_gets_the_first_and_says_so() -> None:
    class Seeded(Clocks):
        def _set_seed(self, seed: int | None) -> None:
            self.seeded = [*getattr(self, "seeded", []), seed]

    env = Seeded(*LENGTHS)
    environment = environments(env)[0]
    with pytest.warns(UserWarning, match="Seeded takes one seed for all.*how many share it"):
        play([environment])
    environment.reset([7, 8, 9, 10], 5)
    assert env.seeded == [100, 7]


class Reusing(Clocks):
    """Returns its own tensors, and writes in them."""

    def __init__(self, *lengths: int, **kwargs: Any) -> None:
        super().__init__(*lengths, **kwargs)
        self.shown: dict[Any, Any] = {}

    def _told(self, values: dict[Any, Any]) -> TensorDictBase:
        for key, value in values.items():
            self.shown.setdefault(key, torch.empty_like(value)).copy_(value)
        return super()._told({key: self.shown[key] for key in values})


class Scored(gym.Env[Any, Any]):
    """Tells its score in the info; one array each, for whatever it returns."""

    observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.seen, self.paid, self.score = (np.zeros(1, np.float32) for _ in range(3))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        for array in (self.seen, self.paid, self.score):
            array[:] = 0
        return self.seen, {"score": self.score}

    def step(self, action: Any) -> Any:
        self.seen += 1
        self.paid[:], self.score[:] = self.seen, 10 * self.seen
        return self.seen, self.paid, bool(self.seen[0] == 3), False, {"score": self.score}


class TestMemoryOfTheEnvironment:
    """What it hands out is written before it writes there again."""

    @pytest.mark.parametrize("num_agents", [0, 2])
    def test_its_tensors(self, num_agents: int) -> None:
        action: Key = ("agents", "action") if num_agents else ACTION
        expected = play(environments(*alone(num_agents)), action=action)
        batch = Reusing(*LENGTHS, num_agents=num_agents)
        assert_same(expected, play(environments(batch), action=action))
        singles = [Reusing(length, alone=True, num_agents=num_agents) for length in LENGTHS]
        assert_same(expected, play(environments(*singles), action=action))

    def test_arrays_of_gymnasium_and_numbers_of_its_info(self) -> None:
        envs = [GymWrapper(Scored(), categorical_action_encoding=True) for _ in range(K)]
        for env in envs:
            spec = Composite(score=Unbounded((1,)))
            env.set_info_dict_reader(default_info_dict_reader(["score"], spec=spec))
        written = play(environments(*envs))[0]
        assert written["next", "observation"][0, :, 0].tolist() == [1, 2, 3, 1, 2]
        assert written["next", "reward"][0, :, 0].tolist() == [1, 2, 3, 1, 2]
        assert written["next", "score"][0].ravel().tolist() == [10, 20, 30, 10, 20]


class TestVectorEnvs:
    """Of gymnasium, in TorchRL's wrapper: only TorchRL may begin their episodes."""

    def test_what_resets_at_the_next_step_is_refused(self) -> None:
        env = GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=True)
        try:
            with pytest.raises(EnvError, match=r"AsyncVectorEnv in .*NEXT_STEP.*without TorchRL"):
                TorchRLEnvironment(TransformedEnv(env, StepCounter()), 0)
        finally:
            env.close()

    def wrapped(self, mode: AutoresetMode) -> Any:
        make = partial(gym.make, "CartPole-v1", max_episode_steps=3)
        batch = SyncVectorEnv([make] * K, autoreset_mode=mode)
        return GymWrapper(batch, categorical_action_encoding=True)

    def test_what_resets_in_the_step_is_refused(self) -> None:
        with pytest.raises(EnvError, match=r"SyncVectorEnv in .*SAME_STEP.*without TorchRL"):
            TorchRLEnvironment(self.wrapped(AutoresetMode.SAME_STEP), 0)

    def test_what_does_not_reset_by_itself(self) -> None:
        written = play(environments(self.wrapped(AutoresetMode.DISABLED)))[0]
        assert np.flatnonzero(written["next", "done"][0]).tolist() == [2]
        assert (written["next", "reward"] == 1).all()
        before, after = written["observation",][:, 3], written["next", "observation"][:, 2]
        assert np.abs(after).min() > 0
        assert not (before == after).any()


class TestRefused:
    def test_a_batch_of_several_dimensions(self) -> None:
        with pytest.raises(ValueError, match=r"made .* batch size \(2, 2\).*of batch size \(k,"):
            TorchRLEnvironment(Square(), 3)

    @pytest.mark.parametrize("max_frames", [0, 5])
    @pytest.mark.parametrize(
        "wrap", [lambda env: env, lambda env: TransformedEnv(env, RewardSum())]
    )
    def test_what_resets_by_itself(self, wrap: Callable[[Any], Any], max_frames: int) -> None:
        """Whose last observations would be NaN."""
        for env in (
            Clocks(3, alone=True, auto_reset=True),
            GymEnv("CartPole-v1", auto_reset=True),
            SerialEnv(2, partial(GymEnv, "CartPole-v1", auto_reset=True)),
        ):
            with pytest.raises(
                EnvError, match=r"^(Clocks|GymEnv) .*make it without auto_reset=True"
            ):
                TorchRLEnvironment(wrap(env), 0, max_frames_per_traj=max_frames)

    def test_environments_that_differ(self) -> None:
        """In what they are named to give; those that differ in shapes TorchRL refuses itself."""

        class More(Clocks):
            def __init__(self) -> None:
                super().__init__(3, alone=True)
                self.observation_spec["more"] = Unbounded((2,))

        env = SerialEnv(2, [partial(Clocks, 3, alone=True), More])
        with pytest.raises(TypeError, match=r"^the environments of a batch differ in 'more': "):
            TorchRLEnvironment(env, 0)


class TestPlay:
    def test_shows_what_one_environment_shows(self) -> None:
        play = TorchRLPlay(Clocks(*LENGTHS))
        play.reset()
        for _ in range(4):
            play.choose()
            assert play.step() is False
        found = play.observations()
        assert found.values["observation"].shape == (len(found.lengths), 3)
        assert found.lengths[found.num_resets :] == (1, 1)  # an episode has two steps

    def test_resets(self) -> None:
        found = torchrl_observations(Clocks(*LENGTHS))
        assert found.values.batch_size == (found.num_resets,)
