"""What can't be saved, and states that don't fit: one clear error, and nothing changed."""

from __future__ import annotations

import array
import itertools
import pickle
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.utils import EzPickle
from resumption import Plain

from torchrl_hts.env_state import (
    CannotSaveError,
    names_of,
    restore_environment,
    save_environment,
)

# What is refused


class WithDict:
    pass


@dataclass(frozen=True, slots=True)
class SlotsAndDict(WithDict):
    value: int


class Remade(EzPickle):
    """As many environments of engines in C are: pickle makes it anew, and forgets."""

    def __init__(self) -> None:
        EzPickle.__init__(self)
        self.speed = 0.0


class Reduced:
    """Says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return Reduced, ()


class Tagged(np.ndarray[Any, Any]):
    """Its attributes would be lost."""


def closure() -> Callable[[], object]:
    """A function that holds a lock."""
    lock = threading.Lock()
    return lambda: lock


def array_over_a_locked_one() -> Any:
    array = np.zeros(3)
    part = array[1:]
    array.flags.writeable = False
    return [part]


def texts() -> Any:
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy 1 has no StringDType")
    return np.array(["a"], np.dtypes.StringDType())


class Stands:
    """Passes for a function of this module, as proxies of packages do."""

    __class__ = property(lambda self: types.FunctionType)  # type: ignore[assignment]

    def __init__(self) -> None:
        self.__qualname__ = "closure"


WITH_DICT, FUNCTION = WithDict(), partial(int)  # what proxies stand for


def numbers() -> Any:
    """A generator."""
    yield from range(3)


@pytest.mark.parametrize(
    ("make_value", "reason"),
    [
        (Remade, "gymnasium.utils.ezpickle.EzPickle.__getstate__ says"),
        (lambda: [{"deep": Reduced()}], "test_env_state_refusals.Reduced.__reduce__ says"),
        (lambda: Plain(Remade()), "EzPickle.__getstate__"),
        (lambda: open(__file__), "TextIOWrapper"),  # noqa: SIM115
        (numbers, "cannot pickle 'generator'"),
        (lambda: iter([1, 2]), "list_iterator.__reduce__"),
        (itertools.count, "itertools.count"),
        (threading.Lock, "cannot pickle"),
        (lambda: {1, 2}, "holds a set"),
        (lambda: deque([{"a": {1}}]), "holds a set"),
        (lambda: frozenset((49, 5, 53, 33)), "holds a set"),
        (lambda: SlotsAndDict(1), "__getstate__"),
        (lambda: np.zeros(3).view(Tagged), "derived from numpy.ndarray"),
        (lambda: np.frombuffer(array.array("d", [1])), "memory belongs to a array"),
        (lambda: texts().dtype, "StringDType"),
        (texts, "StringDType: keep a list of str in its place"),
        (array_over_a_locked_one, "over another one that can't: keep a copy"),
        (lambda: [weakref.proxy(WITH_DICT)], "a ProxyType, which passes for what it stands for"),
        (lambda: {"call": weakref.proxy(FUNCTION)}, "holds a CallableProxyType"),
        (lambda: weakref.proxy(WithDict()), "a ProxyType"),  # whose object is gone
        (lambda: [Stands()], "a Stands, which passes for what it stands for"),
        (lambda: [lambda: 1], "lambda"),
        (lambda: ValueError("x"), "BaseException.__reduce__"),
        (lambda: memoryview(b"x"), "cannot pickle"),
    ],
)
def test_refusals_name_the_layer_and_the_attribute(
    make_value: Callable[[], object], reason: str
) -> None:
    value = make_value()
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    env = wrappers.TimeLimit(Plain(value), 5)
    where = f"environment layer resumption.Plain: attribute 'value' ({kind}) can't be saved: "
    with pytest.raises(CannotSaveError, match=re.escape(where) + ".*" + re.escape(reason)):
        save_environment(env)


def test_what_a_closure_holds_can_be_refused() -> None:
    with pytest.raises(
        CannotSaveError, match=r"function closure.<locals>.<lambda> of .*\.Plain.*lock"
    ):
        save_environment(Plain(closure()))


def test_slots_of_a_layer_are_refused() -> None:
    class Slotted(Plain):
        __slots__ = ("hidden",)

    with pytest.raises(CannotSaveError, match="Slotted keeps state outside of its __dict__"):
        save_environment(Slotted())


def test_what_is_saved_along_can_be_refused() -> None:
    with pytest.raises(CannotSaveError, match="what was given to be saved along"):
        save_environment(Plain(), threading.Lock())


@pytest.mark.parametrize("env", [3, None, object()])
def test_what_is_no_environment_is_refused(env: Any) -> None:
    restore = partial(restore_environment, state=save_environment(Plain()))
    for use in (names_of, save_environment, restore):
        with pytest.raises(TypeError, match=r"expected a gymnasium\.Env, got"):
            use(env)


@pytest.mark.parametrize("state", ["x", None, 3])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(TypeError, match="must be bytes, as save_environment returned it, got"):
        restore_environment(Plain(), state)


# States that don't fit


def test_a_state_of_another_chain() -> None:
    state = save_environment(gym.make("CartPole-v1"))
    with pytest.raises(ValueError, match=r"another make\. Only the saved one has: .*CartPoleEnv"):
        restore_environment(gym.make("Pendulum-v1"), state)
    with pytest.raises(ValueError, match=r"Only this one has: .*FrameStackObservation"):
        restore_environment(wrappers.FrameStackObservation(gym.make("CartPole-v1"), 2), state)


def test_a_state_of_another_function() -> None:
    env = Plain()
    one = save_environment(wrappers.TransformReward(env, lambda reward: reward * 2))
    with pytest.raises(
        ValueError, match=r"another make.*function test_a_state_of_another_function"
    ):
        restore_environment(wrappers.TransformReward(env, lambda reward: reward.clip(-1)), one)


def test_functions_that_differ_in_a_constant_are_others() -> None:
    """Also where the constant is one of a function in them."""
    pairs = [
        (lambda reward: reward * 2, lambda reward: reward * 3),
        (lambda x: [(lambda y: y + 1)(x)], lambda x: [(lambda y: y + 2)(x)]),
        (lambda x: x in {1, 2}, lambda x: x in {1, 3}),
    ]
    for one, other in pairs:
        state = save_environment(wrappers.TransformReward(Plain(), one))
        with pytest.raises(ValueError, match="another make"):
            restore_environment(wrappers.TransformReward(Plain(), other), state)
        restore_environment(wrappers.TransformReward(Plain(), one), state)


def test_what_no_new_environment_could_take_is_refused_when_it_is_saved() -> None:
    class Chooses(Plain):
        """Makes a rule in reset, of which the new one has none."""

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.value = lambda reward: -reward
            return super().reset(seed=seed, options=options)

    env = Chooses()
    names = names_of(env)
    save_environment(env, names=names)
    env.reset()
    with pytest.raises(CannotSaveError, match=r"isn't made up as .* It now has: function .*lambda"):
        save_environment(env, names=names)


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "flipped", "foreign"])
def test_a_damaged_state(damage: str) -> None:
    state = save_environment(gym.make("CartPole-v1"))
    middle = len(state) // 2
    damaged = {
        "empty": b"",
        "cut": state[:-1],
        "longer": state + b".",
        "flipped": state[:middle] + bytes([state[middle] ^ 1]) + state[middle + 1 :],
        "foreign": pickle.dumps(1),
    }
    with pytest.raises(ValueError, match="damaged, of another version"):
        restore_environment(gym.make("CartPole-v1"), damaged[damage])


class Renamed:
    """A class that the next version of the user's code hasn't any more."""


class Holding(Plain):
    """An environment of this module, whose classes its states may name."""


def test_code_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    state, env = save_environment(Holding(Renamed())), Holding()
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules[__name__], "Renamed")
        with pytest.raises(ValueError, match=r"read here: .*'Renamed'.*Restore it with the code"):
            restore_environment(env, state)
    restore_environment(env, state)  # with the code that saved it
    assert type(env.value) is Renamed
