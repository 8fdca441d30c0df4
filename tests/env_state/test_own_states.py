"""Environments that say themselves what their state is: get_state and set_state."""

from __future__ import annotations

import enum
import threading
import weakref
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from resumption import Plain, check_resumption

from torchrl_hts.env_state import (
    CannotSaveError,
    names_of,
    restore_environment,
    save_environment,
)


class Mode(enum.Enum):
    """How it is played."""

    FAST = 1


class Engine:
    """Something that can't be pickled."""

    def __init__(self) -> None:
        self.position = 0.0
        self.lock = threading.Lock()


class WithEngine(gym.Env[Any, Any]):
    """Saved by what it says of itself; gymnasium's own generator is saved along."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (), np.float64)

    def __init__(self) -> None:
        self.engine = Engine()

    def get_state(self) -> Any:
        """All of it."""
        return {"position": self.engine.position}

    def set_state(self, state: Any) -> None:
        """The other way round."""
        self.engine.position = state["position"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Starts anywhere."""
        super().reset(seed=seed)
        self.engine.position = float(self.np_random.normal())
        return np.array(self.engine.position), {}

    def step(self, action: int) -> Any:
        """Walks at random."""
        self.engine.position += action - 0.5 + self.np_random.normal()
        return np.array(self.engine.position), 0.0, abs(self.engine.position) > 4, False, {}


def test_an_environment_can_say_itself_what_its_state_is() -> None:
    check_resumption(lambda: wrappers.TimeLimit(WithEngine(), 20), 200)


def test_a_state_that_is_not_all_is_not_what_is_saved() -> None:
    class Partly(Plain):
        """Tells its physical state alone, as many environments do."""

        def get_state(self) -> Any:
            return self.value

        def set_state(self, state: Any) -> None:
            self.value = state

    env, restored = Partly([1]), Partly()
    env.count = 7
    restore_environment(restored, save_environment(env))
    assert (restored.value, restored.count) == ([1], 7)


def test_what_it_does_not_say_may_be_gone() -> None:
    class Left(Plain):
        """Holds a proxy whose object is gone."""

        def __init__(self, value: Any = None) -> None:
            super().__init__(value)
            self.gone = weakref.proxy(Plain())

        def get_state(self) -> Any:
            return self.value

        def set_state(self, state: Any) -> None:
            self.value = state

    restored = Left()
    restore_environment(restored, save_environment(Left([1])))
    assert restored.value == [1]


def test_what_it_says_is_looked_at_as_well() -> None:
    class Careless(WithEngine):
        def get_state(self) -> Any:
            return self.engine

    with pytest.raises(CannotSaveError, match=r"Careless: attribute 'get_state\(\)'.*lock"):
        save_environment(Careless())


def test_a_wrapper_that_shares_what_the_base_saves_itself_is_refused() -> None:
    env = wrappers.TimeLimit(WithEngine(), 20)
    env.eye = env.unwrapped.engine  # type: ignore[attr-defined]
    with pytest.raises(CannotSaveError, match=r"'eye'.*shares 'engine' with the base environment"):
        save_environment(env)


def test_methods_of_other_shapes_are_not_taken_for_it() -> None:
    class LikeMuJoCo(Plain):
        def get_state(self) -> Any:
            raise AssertionError

        def set_state(self, positions: Any, velocities: Any) -> None:
            raise AssertionError

    env, restored = LikeMuJoCo([1]), LikeMuJoCo()
    restore_environment(restored, save_environment(env))
    assert restored.value == [1]


class Foreign:
    """As of a package that no layer of the environment is of."""


Foreign.__module__ = "another_package.boards"


def test_what_may_not_be_named_is_saved_by_what_the_environment_says() -> None:
    """A refusal advises to define both methods, so they must help."""

    class Late(Plain):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.value = Foreign()
            return super().reset(seed=seed, options=options)

    class Tells(Late):
        def get_state(self) -> Any:
            return self.count

        def set_state(self, state: Any) -> None:
            self.count, self.value = state, "made anew"

    silent, env, other = Late(), Tells(), Tells()
    of_silent, of_tells = names_of(silent), names_of(env)
    silent.reset()
    with pytest.raises(CannotSaveError, match="define get_state"):
        save_environment(silent, names=of_silent)
    env.reset()
    env.count = 7
    restore_environment(other, save_environment(env, names=of_tells), names=names_of(other))
    assert (other.count, other.value) == (7, "made anew")


def test_what_cannot_change_may_be_shared() -> None:
    env = wrappers.TimeLimit(WithEngine(), 20)
    base: Any = env.unwrapped
    base.dtype, base.mode = np.dtype("float32"), Mode.FAST
    env.dtype, env.mode = base.dtype, base.mode  # type: ignore[attr-defined]
    save_environment(env)
