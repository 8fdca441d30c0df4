"""Spaces are each environment's own, and seeded with it, wherever it has them from."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from probe import has_drawn

from torchrl_hts._executor.spaces import own_spaces, seed_spaces
from torchrl_hts.envs.drawing import DrawingEnv
from torchrl_hts.errors import EnvError

LIMITS = gym.spaces.Discrete(1000)


class Shared(gym.Wrapper[Any, Any, Any, Any]):
    """Has a space of its module."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.limits = LIMITS
        self.pool = [LIMITS, {"other": (gym.spaces.Discrete(1000),)}]


def test_spaces_are_each_environments_own() -> None:
    envs = [Shared(DrawingEnv()) for _ in range(3)]
    for env in envs:
        own_spaces(env)
    for env, seed in zip(envs, (1, 2, 1), strict=True):
        seed_spaces(env, seed)
    drawn = [
        [[space.sample().tolist() for _ in range(20)] for space in (env.limits, env.action_space)]
        for env in envs
    ]
    assert drawn[0] == drawn[2] != drawn[1]
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
    others = [[env.pool[1]["other"][0].sample().item() for _ in range(20)] for env in envs]
    assert others[0] == others[2] != others[1], "in containers too"
    assert all(env.pool[0] is env.limits for env in envs), "what was one space stays one"
    assert not has_drawn(LIMITS), "the module's is left alone"
    assert not has_drawn(DrawingEnv.action_space)


class Opponent:
    """Draws from the space of its environment."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space


class Drawing(gym.Env[Any, Any]):
    """Observes what its space draws, in three ways of holding it."""

    def __init__(self, space: Any = None) -> None:
        self.observation_space = gym.spaces.Box(0, 999, (3,), np.float32)
        self.action_space = own = space or gym.spaces.Discrete(1000)
        self.opponent = Opponent(own)
        self.draw = lambda: own.sample()
        self.sample = self.action_space.sample

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        return self._observation(), 0.0, False, False, {}

    def _observation(self) -> Any:
        drawn = self.opponent.space.sample(), self.draw(), self.sample()
        return np.array(drawn, np.float32)


def drawn(env: gym.Env[Any, Any], seed: int) -> list[Any]:
    own_spaces(env)
    seed_spaces(env, seed)
    return [env.step(None)[0].tolist() for _ in range(5)]


def test_who_else_holds_a_space_of_an_environment_draws_from_the_same() -> None:
    assert drawn(Drawing(), 1) == drawn(Drawing(), 1) != drawn(Drawing(), 2)


def test_spaces_in_slots() -> None:
    class Slotted(gym.Env[Any, Any]):
        __slots__ = ("_Slotted__private", "action_space")

        def __init__(self) -> None:
            self.action_space = LIMITS
            self._Slotted__private = gym.spaces.Discrete(1000)

        def step(self, action: Any) -> Any:
            numbers = self.action_space.sample(), self._Slotted__private.sample()
            return np.array(numbers), 0.0, False, False, {}

    assert drawn(Slotted(), 1) == drawn(Slotted(), 1) != drawn(Slotted(), 2)
    assert not has_drawn(LIMITS)


def test_a_space_that_knows_its_environment() -> None:
    class Legal(gym.spaces.Discrete):
        def __init__(self, env: Any) -> None:
            super().__init__(1000)
            self.env = env

    env = Drawing()
    env.action_space = Legal(env)
    for _ in range(2):
        own_spaces(env)
        assert env.action_space.env is env


def test_a_space_that_several_environments_are_given_is_copied_for_the_later_ones() -> None:
    space = gym.spaces.Discrete(1000)
    spaces = space, space, gym.spaces.Dict(a=space), gym.spaces.Tuple([space])
    envs = [gym.Wrapper(Drawing(one)) for one in spaces]
    for env in envs:
        own_spaces(env)
        own_spaces(env)
    own = [env.unwrapped.action_space for env in envs]
    assert own[0] is space
    assert own[1] is not space
    for one in own:
        one.seed(1)
    numbers = [space.sample() for _ in range(9)]
    space.seed(1)
    for one in own[1:]:
        one.sample()
    assert [space.sample() for _ in range(9)] == numbers


class Locked(gym.spaces.Discrete):
    def __init__(self) -> None:
        super().__init__(1000)
        self.lock = threading.Lock()


def test_a_space_that_can_not_be_copied() -> None:
    own_spaces(Drawing(Locked()))

    class Sharing(Drawing):
        action_space = Locked()  # type: ignore[assignment]

        def __init__(self) -> None:
            self.observation_space = gym.spaces.Box(0, 1, (3,))

    with pytest.raises(EnvError, match=r"action_space of Sharing.*TypeError.*in the constructor"):
        own_spaces(Sharing())


def test_containers_that_hold_each_other_or_lie_deep() -> None:
    env = Drawing()
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    around: dict[str, Any] = {"space": LIMITS, "deep": deep}
    around["around"] = around
    env.pool, env.deep = around, deep  # type: ignore[attr-defined]
    own_spaces(env)
    pool = env.pool  # type: ignore[attr-defined]
    assert pool["around"] is pool is not around
    assert pool["space"] is not LIMITS
    assert pool["deep"] is deep
