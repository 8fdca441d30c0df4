"""Environments of the old gym are told apart; the wrapper of docs/how_to/old_gym.md mends them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from advised import BOX, ZEROS, gather, refusal
from environments import EchoEnv
from policies import marked

from torchrl_hts import Evaluator
from torchrl_hts._executor.gym_env import GymEnvironment
from torchrl_hts._executor.old_gym import is_old_gym
from torchrl_hts.errors import WorkerError

pytestmark = pytest.mark.usefixtures("warm_servers")
PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "old_gym.md"


class Old(gym.Env[Any, Any]):
    """A new class with old ways, one or all of them."""

    observation_space, action_space = BOX, gym.spaces.Discrete(3)

    def __init__(self, *ways: str) -> None:
        self.ways = ways

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        outcomes = {"alone": ZEROS, "swapped": ({}, ZEROS), "three": (ZEROS, {}, {})}
        return next((outcomes[way] for way in self.ways if way in outcomes), (ZEROS, {}))

    def step(self, action: Any) -> Any:
        if "four" in self.ways:
            return ZEROS, 1.0, False, {}
        if "six" in self.ways:
            return ZEROS, 1.0, False, False, {}, {}
        if "none" in self.ways:
            return None
        return ZEROS, 1.0, np.zeros(2, bool) if "flags" in self.ways else False, False, {}


class Unseeded(Old):
    """Takes no seed."""

    def reset(self) -> Any:  # type: ignore[override]
        return ZEROS, {}


class Failing(Old):
    """Has an error of its own that looks like one of ours."""

    def reset(self, **_: Any) -> Any:
        if "reset" in self.ways:
            raise TypeError("no such field")
        return ZEROS, {}

    def step(self, action: Any) -> Any:
        one, two = [action]  # not enough values to unpack
        return one, two


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("four", "step returned 4 values; expected 5: observation, reward, terminated, trunc"),
        ("six", r"step did not return 5 values .*: too many values to unpack \(expected 5"),
        ("none", "step did not return 5 values .*: cannot unpack non-iterable NoneType"),
        ("alone", r"reset returned array.*; expected two values, \(observation, info\)"),
        ("three", r"reset returned \(array.*; expected two values"),
        ("swapped", "reset returned array.* as the second of its values; .* info is a dict"),
        ("flags", r"returned terminated=array\(\[False, False\]\) and truncated=False; .* a bool"),
    ],
)
def test_each_way_is_named(way: str, said: str) -> None:
    message = refusal(partial(Old, way))
    assert re.search(said, message)
    old = way in ("four", "alone", "three", "swapped")
    assert (
        "It has the API of the old gym: wrap it as docs/how_to/old_gym.md shows" in message
    ) == old


def test_a_reset_without_a_seed() -> None:
    message = refusal(Unseeded)
    assert "the environment's reset takes no seed" in message
    assert "docs/how_to/old_gym.md" in message
    assert "reset(self, *, seed=None, options=None)" in message
    gather(Old)


def test_wrappers_of_gymnasium_around_it() -> None:
    """Which fail at it themselves, as any call of the environment's own may."""
    for env, said in [
        (Old("four"), "step (or a call inside it) returned 4 values"),
        (Unseeded(), "reset (or a call inside it) takes no seed"),
    ]:
        assert said in refusal(lambda env=env: gym.wrappers.TimeLimit(env, 10))


@pytest.mark.parametrize("way", ["reset", "step"])
def test_errors_of_the_environment_stay_its_own(way: str) -> None:
    with pytest.raises(WorkerError) as caught:
        gather(partial(Failing, way))
    assert caught.value.failure.name == "RAISED"
    assert "old gym" not in str(caught.value)


def test_one_flag_in_an_array_is_taken() -> None:
    class Arrays(Old):
        def step(self, action: Any) -> Any:
            return ZEROS, 1.0, np.zeros(1, bool), np.ones((), bool), {}

    assert gather(Arrays)["next", "truncated"].all()


def test_an_evaluator_says_it_too() -> None:
    def evaluate(way: str) -> None:
        with Evaluator(partial(Old, way), marked(), num_episodes=1) as evaluator:
            evaluator.submit(0)  # raises if it has failed by then
            evaluator.wait()

    for way, said in [("four", "step .*returned 4 values"), ("alone", "reset returned array")]:
        with pytest.raises(WorkerError, match=said):
            evaluate(way)


class Box:
    """As in the package gym: no class of gymnasium."""

    def __init__(self) -> None:
        self.low, self.high = np.full(4, -9, np.float32), np.full(4, 9, np.float32)
        self.shape, self.dtype = (4,), np.dtype(np.float32)


class Discrete:
    """Likewise."""

    n = 3


class Foreign:
    """An environment of the package gym, as far as its methods go."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(), Discrete()
        self.closed = False

    def seed(self, seed: int) -> None:
        self.noise = np.random.default_rng(seed)

    def reset(self) -> Any:
        self.t = 0
        return self.noise.random(4, np.float32)

    def step(self, action: Any) -> Any:
        self.t += 1
        observation = self.noise.random(4, np.float32)
        return observation, 1.0, self.t >= 3, {"TimeLimit.truncated": self.t >= 3}

    def close(self) -> None:
        self.closed = True


Foreign.__module__ = "gym.envs.classic_control"


def test_what_the_page_shows() -> None:
    """The wrapper makes an environment of gymnasium that can be played."""
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    old = Foreign()
    assert is_old_gym(old)
    assert not is_old_gym(EchoEnv())
    env = names["OldGym"](old)
    first, _ = env.reset(seed=3)
    for _ in range(2):
        assert env.step(1)[2:4] == (False, False)
    assert env.step(1)[2:4] == (False, True), "truncated"
    assert (env.reset(seed=3)[0] == first).all()
    assert GymEnvironment(env, 0).description.observation_space.contains(first)
    env.close()
    assert old.closed
    space = gym.spaces.Dict(a=gym.spaces.MultiDiscrete([2, 3]), b=gym.spaces.MultiBinary(2))
    assert names["new_space"](space) is space


def test_the_package_gym_is_named() -> None:
    message = refusal(Foreign)
    assert "VectorEnv or a torchrl.envs.EnvBase. It has the API of the old gym" in message
    with pytest.raises(TypeError, match=r"expected a gymnasium\.Env\. It has the API of the old"):
        Evaluator(Foreign, marked())
