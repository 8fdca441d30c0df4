"""Evaluations in batches of gymnasium environments: what single ones give, and their films."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import EchoEnv
from evaluating import PayingEnv, cart_pole, one, pays, remembers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from policies import categorical
from tensordict.nn import TensorDictModule
from torch import Tensor

from torchrl_hts import Evaluator
from torchrl_hts._evaluation.player import env_seed
from torchrl_hts.envs import make_atari_batch

pytestmark = pytest.mark.usefixtures("nothing_left")


def batches_of(k: int, make: Any = cart_pole, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
    return functools.partial(SyncVectorEnv, [make] * k, autoreset_mode=mode)


# What comes out.


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_returns_are_those_of_single_environments(mode: AutoresetMode) -> None:
    """Also where the last batch has more environments than there are episodes."""
    policy = categorical(num_actions=2)
    expected = one(cart_pole, policy, num_episodes=5, seed=3)
    assert len(set(expected.lengths)) > 2
    assert one(batches_of(3, mode=mode), policy, num_episodes=5, seed=3) == expected
    own_processes = functools.partial(
        gym.vector.AsyncVectorEnv, [cart_pole] * 5, autoreset_mode=mode
    )
    assert one(own_processes, policy, num_episodes=5, seed=3) == expected


class Endless(gym.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


def test_nobody_waits_for_episodes_that_do_not_count() -> None:
    policy = categorical(num_actions=2)
    more = functools.partial(SyncVectorEnv, [cart_pole, lambda: Endless(cart_pole())])
    assert one(more, policy, num_episodes=1) == one(cart_pole, policy, num_episodes=1)


def test_what_was_evaluated_before_does_not_matter() -> None:
    policy = categorical(num_actions=2)
    with Evaluator(batches_of(2), policy, num_episodes=4) as evaluator:
        for step in range(3):
            evaluator.submit(step)
        first, *others = [each.returns for each in evaluator.wait()]
    assert others == [first] * 2


def test_returns_are_summed_up_as_the_environment_gives_them() -> None:
    """Not as float32, which the memory of a batch has."""
    policy = pays(0.1)
    result = one(batches_of(2, functools.partial(PayingEnv, bonus=1e-9)), policy, num_episodes=2)
    assert result == one(functools.partial(PayingEnv, bonus=1e-9), policy, num_episodes=2)


def test_rewards_may_be_arrays_of_one_number() -> None:
    def make() -> gym.Env[Any, Any]:
        return gym.wrappers.TransformReward(PayingEnv(), lambda reward: np.array([reward]))

    policy = pays(0.5)
    expected = one(PayingEnv, policy, num_episodes=2)
    assert one(make, policy, num_episodes=2) == expected
    assert one(batches_of(2, make), policy, num_episodes=2) == expected


def test_recurrent_policies_carry_their_state() -> None:
    torch.manual_seed(0)
    policy = remembers()
    expected = one(PayingEnv, policy, num_episodes=4)
    result = one(batches_of(2, PayingEnv), policy, num_episodes=4)
    assert result.lengths == expected.lengths
    assert result.returns == pytest.approx(expected.returns, rel=1e-5)


def test_episodes_can_be_cut_off() -> None:
    make = batches_of(2, functools.partial(EchoEnv, lengths=(10**9,)))
    result = one(make, categorical(), num_episodes=3, max_frames_per_episode=4)
    assert result.lengths == (4,) * 3
    assert result.returns == (1 + 2 + 3 + 4,) * 3


def test_a_policy_that_refuses_what_is_not_real_is_shown_an_environment() -> None:
    def act(observation: Tensor) -> Tensor:
        if (
            not (observation[:, 2] == observation[:, 2].round()).all()
            or (observation[:, 0] < env_seed(0, 0) % 1).any()
        ):
            raise ValueError("no such observation")
        return torch.ones(len(observation), dtype=torch.int64)

    policy = TensorDictModule(act, ["observation"], ["action"])
    assert one(batches_of(2, EchoEnv), policy, num_episodes=2).returns == (15.0, 15.0)


def test_games_of_ales_own() -> None:
    """In batches of whatever size, and again after an evaluation."""
    pytest.importorskip("ale_py")

    def act(observation: Tensor) -> Tensor:
        return observation[:, -1].flatten(1).sum(1) % 6

    policy = TensorDictModule(act, ["observation"], ["action"])
    found = []
    for k in (1, 2, 4):
        make = functools.partial(make_atari_batch, "ALE/Pong-v5", k)
        with Evaluator(make, policy, num_episodes=4, max_frames_per_episode=300) as evaluator:
            evaluator.submit(0)
            evaluator.submit(1)
            found += [(each.returns, each.lengths) for each in evaluator.wait()]
    assert len(set(found[0][0])) > 1
    assert found == [found[0]] * 6


def pool(k: int) -> Any:
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=k, seed=3)


@pytest.mark.skipif(find_spec("envpool") is None, reason="EnvPool is not installed")
class TestEnvPool:
    """Its seed is given where a pool is made."""

    def test_plays_on_from_one_evaluation_to_the_next_and_says_so(self) -> None:
        policy = categorical(num_actions=2)
        with pytest.warns(RuntimeWarning, match="an evaluation plays other episodes than the one"):
            evaluator = Evaluator(functools.partial(pool, 6), policy, num_episodes=5)
        with evaluator:
            for step in range(2):
                evaluator.submit(step)
            first, second = evaluator.wait()
        assert len(first.returns) == 5
        assert all(
            total == length for total, length in zip(first.returns, first.lengths, strict=True)
        )
        assert first.lengths != second.lengths

    def test_several_batches_that_would_play_the_same_are_refused(self) -> None:
        with pytest.raises(TypeError, match="several batches of one factory would play the same"):
            Evaluator(functools.partial(pool, 3), categorical(num_actions=2), num_episodes=5)


# What is warned of, and refused.


class Untouched(gym.Wrapper[Any, Any, Any, Any]):
    pass


@pytest.mark.parametrize("outside", [False, True])
def test_statistics_of_its_own_are_warned_of(outside: bool) -> None:
    def make() -> Any:
        if outside:
            envs = gym.wrappers.vector.NormalizeObservation(batches_of(1)())
            return gym.wrappers.vector.NormalizeReward(envs)
        return batches_of(2, lambda: gym.wrappers.NormalizeReward(
            gym.wrappers.NormalizeObservation(Untouched(cart_pole()))
        ))()  # fmt: skip

    with pytest.warns(RuntimeWarning) as told:
        Evaluator(make, categorical(num_actions=2), num_episodes=1).shutdown()
    said = [str(each.message) for each in told if each.category is RuntimeWarning]
    assert len(said) == 2
    assert "normalise observations with running statistics of their own (Normali" in said[0]
    assert "normalise rewards (NormalizeReward)" in said[1]


def test_one_that_would_waste_a_step_is_refused() -> None:
    make = functools.partial(gym.make_vec, "CartPole-v1", 2, "vector_entry_point")
    with pytest.raises(Exception, match=r"make_vec\(\.\.\., vectorization_mode='sync'\)"):
        Evaluator(make, categorical(num_actions=2))


# Films.


class Filmed(PayingEnv):
    """Writes down what it renders."""

    def __init__(self, log: Path) -> None:
        super().__init__(render_mode="rgb_array")
        self.log = log

    def render(self) -> np.ndarray:
        with self.log.open("a") as log:
            log.write(f"{self.t} {self.last}\n")
        return super().render()


def test_the_best_episode_is_filmed_in_one_environment(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    film, log = tmp_path / "best.mp4", tmp_path / "log"
    with Evaluator(
        batches_of(3, PayingEnv),
        pays(2.0),
        num_episodes=6,
        video_path=film,
        create_render_env_fn=functools.partial(Filmed, log),
    ) as evaluator:
        evaluator.submit(0)
        (evaluation,) = evaluator.wait()
    assert evaluation.video == film
    assert b"ftyp" in film.read_bytes()[:16]
    length = max(evaluation.lengths)
    assert evaluation.lengths.index(length) % 3, "no first row"
    _tried, *shown = log.read_text().splitlines()
    assert shown == ["0 0.0", *(f"{t} 2.0" for t in range(1, length + 1))]


def test_a_batch_to_film_in_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    make = batches_of(2, functools.partial(PayingEnv, "rgb_array"))
    with pytest.raises(TypeError, match=r"can't be filmed: let it make one environment like those"):
        Evaluator(make, pays(), video_path=tmp_path / "best.mp4", create_render_env_fn=make)
