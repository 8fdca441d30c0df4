"""The environments of a `SyncVectorEnv`: taken, converted and refused as single ones are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from rows import WRITES_ALL
from vector_walks import K, assert_same, batch, play, singles

from torchrl_hts._executor.gym_env import RowOptions
from torchrl_hts.errors import InvalidValueError

REAL = Box(-np.inf, np.inf, (1,), np.float32)
ZERO = np.zeros(1, np.float32)


class Gives(gym.Env[Any, Any]):
    """Gives what a function makes of the number of a step."""

    action_space = Discrete(3)

    def __init__(
        self,
        space: gym.Space[Any],
        seen: Callable[[int], Any],
        paid: Callable[[int], Any] = float,
        told: Callable[[int], Any] = lambda t: {},
    ) -> None:
        self.observation_space, self.seen, self.paid, self.told = space, seen, paid, told

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.seen(0), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.seen(self.t), self.paid(self.t), self.t >= 3, False, self.told(self.t)


def both(make: Callable[[], Any], options: RowOptions = WRITES_ALL) -> None:
    assert_same(play(singles(make), [1] * K, options), play([batch(make)], [K], options))


@pytest.mark.parametrize(
    ("space", "seen"),
    [
        (Box(0, 255, (1,), np.uint8), lambda t: np.array([250 + t])),
        (REAL, lambda t: [t / 3]),
        (REAL, lambda t: np.array([t / 3])),
        (Discrete(5), lambda t: t),
        (MultiBinary(2), lambda t: [t == 1, True]),
        (
            Dict(a=REAL, b=Dict(c=Discrete(9), d=Box(0, 9, (2,), np.int64))),
            lambda t: {"a": [t / 3], "b": {"c": t, "d": np.array([t, 1], np.int8)}},
        ),
    ],
)
def test_what_is_converted_as_single_ones_are(space: Any, seen: Any) -> None:
    both(lambda: Gives(space, seen))


@pytest.mark.parametrize("paid", [int, lambda t: np.ones(1), lambda t: np.float32(t / 3)])
def test_rewards(paid: Any) -> None:
    both(lambda: Gives(REAL, lambda t: ZERO, paid))


@pytest.mark.parametrize(
    ("space", "seen", "paid"),
    [
        (Box(0, 255, (1,), np.uint8), lambda t: np.array([255 + t]), float),
        (REAL, lambda t: np.array([1e39 * t]), float),
        (Box(-9, 9, (1,), np.int64), lambda t: np.array([0.5 * t]), float),
        (Dict(a=REAL), lambda t: {"a": ZERO, "b": 1}, float),
        (REAL, lambda t: np.ma.array([t], mask=[True], dtype=np.float32), float),
        (Discrete(5), lambda t: 1.7, float),
        (MultiBinary(1), lambda t: np.array([300]), float),
        (REAL, lambda t: np.zeros((1, 1), np.float32), float),
        (REAL, lambda t: ZERO, lambda t: None),
        (REAL, lambda t: ZERO, str),
        (REAL, lambda t: ZERO, lambda t: np.ma.masked),
    ],
)
def test_what_is_refused_as_single_ones_are(space: Any, seen: Any, paid: Any) -> None:
    def make() -> Any:
        return Gives(space, seen, paid)

    with pytest.raises(InvalidValueError) as alone:
        play(singles(make), [1] * K)
    with pytest.raises(InvalidValueError) as together:
        play([batch(make)], [K])
    assert str(together.value) == str(alone.value)


@pytest.mark.parametrize("told", [1, 0.5, True, None])
def test_numbers_of_info_keep_what_they_say(told: Any) -> None:
    """Also where the first environment tells an integer, or nothing."""
    options = RowOptions(0, True, (("action",),), (), info_keys=(("score",),))
    made: list[Any] = []

    def make() -> Any:
        made.append(None)
        first = len(made) % K == 1
        tell = (lambda t: {"score": told}) if first else (lambda t: {"score": t + 0.25})
        return Gives(REAL, lambda t: ZERO, told=tell)

    both(make, options)


def test_an_environment_is_at_hand_as_ever() -> None:
    environment = batch(lambda: Gives(REAL, lambda t: ZERO))
    assert len(environment.env.call("unwrapped")) == K
    environment.env.set_attr("t", 7)
    assert environment.env.get_attr("t") == (7,) * K
