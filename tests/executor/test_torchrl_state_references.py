"""What a TorchRL environment refers to is the same when it goes on from a state."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, GymWrapper
from torchrl_resumption import KEY, Part, check_resumption, saved

from torchrl_hts.errors import CannotSaveError

START, RED, GREEN, EMPTY = Part(), Part(), Part(), object()
GREEN.total = 2.0


class Pair(NamedTuple):
    """A tuple with names."""

    one: float
    other: float


class Sides(enum.Flag):
    """May be added up."""

    LEFT, RIGHT = enum.auto(), enum.auto()


class Changes(EnvBase):
    """Shows what a function makes of an action, which it is also added up by."""

    def __init__(self, prepare: Callable[[Any], None], step: Callable[[Any, int], float]) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Categorical(3)
        self.reward_spec = Unbounded((1,))
        self.total, self.taken = 0, step
        prepare(self)

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        return TensorDict({KEY: torch.zeros(1)})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = int(tensordict["action"])
        self.total += action
        shown = torch.tensor([float(self.taken(self, action))])
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict({KEY: shown, "reward": torch.ones(1), "done": done})

    def _set_seed(self, seed: int | None) -> None:
        pass


def steps_to(name: str, *choices: Any) -> Callable[[Any, int], Any]:
    """A step that puts one of some values into an attribute, as its action says."""

    def step(env: Any, action: int) -> float:
        before = getattr(env, name, None)
        setattr(env, name, choices[action % len(choices)])
        at = next((at for at, each in enumerate(choices) if before is each), -1)
        at = at if at >= 0 or before not in choices else choices.index(before)
        return env.total + at / 10

    return step


def sometimes_a_part(env: Any, action: int) -> float:
    before = getattr(env, "part", None)
    env.part = Part() if action else None
    if action:
        env.part.total = env.total
    return env.total + (before.total if before else 0)


def sum_of_nets(env: Any, action: int) -> float:
    env.active = env.nets[action % 2]
    with torch.no_grad():
        env.active.weight.add_(action)
        return float(sum(net(torch.ones(1)) for net in (*env.nets, env.active)))


def two_generators(env: Any, action: int) -> float:
    return float(env.one.random() + 2 * env.other.random() + env.draw())


def give_generators(env: Any) -> None:
    bits = np.random.PCG64(3)
    env.one, env.other = np.random.Generator(bits), np.random.Generator(bits)
    env.draw = env.one.random


def give_nets(env: Any) -> None:
    torch.manual_seed(0)
    env.nets = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])


@pytest.mark.parametrize(
    ("prepare", "step"),
    [
        (lambda env: setattr(env, "phase", RED), steps_to("phase", RED, GREEN)),
        (lambda env: setattr(env, "cell", EMPTY), steps_to("cell", EMPTY, None)),
        (lambda env: setattr(env, "start", START), steps_to("start", START, RED, START)),
        (
            lambda env: setattr(env, "sides", Sides.LEFT),
            steps_to("sides", Sides.LEFT, Sides.LEFT | Sides.RIGHT),
        ),
        (lambda env: setattr(env, "pair", Pair(0, 0)), steps_to("pair", Pair(0, 1), None)),
        (lambda env: None, sometimes_a_part),
        (give_nets, sum_of_nets),
        (give_generators, two_generators),
    ],
)
def test_i7_what_an_environment_refers_to(
    prepare: Callable[[Any], None], step: Callable[[Any, int], float]
) -> None:
    """Objects of its module, objects that are there now and then, one object by two ways."""
    check_resumption(lambda: Changes(prepare, step))
    assert (START.total, RED.total, GREEN.total) == (0.0, 0.0, 2.0), "they are the process's"


SCRIPT = """
START, OTHER = Part(), Part()
OTHER.total = 2.0

class OfAScript(Changes):
    def __init__(self):
        self.now = START
        super().__init__(lambda env: None, type(self).take)

    def take(self, action):
        before, self.now = self.now, OTHER if action else START
        return self.total + (before is OTHER) / 10

    def both(self):
        return START.total, OTHER.total
"""


def test_i7_what_a_script_holds_is_the_process_s_too() -> None:
    """Executors get its classes by value, so that no module has them."""
    own = {"Part": Part, "Changes": Changes, "__name__": "a_script"}
    exec(compile(SCRIPT, "a_script", "exec", dont_inherit=True), own)
    make = pickle.loads(cloudpickle.dumps(own["OfAScript"]))
    check_resumption(make)
    assert make().both() == (0.0, 2.0)


def test_objects_that_gymnasium_shares_with_what_is_around_it_are_refused() -> None:
    def make() -> EnvBase:
        simulator = gym.make("CartPole-v1")
        env = GymWrapper(simulator)
        env.also = simulator.unwrapped.action_space
        return env

    with pytest.raises(CannotSaveError, match=r"another part of the environment share a Discrete"):
        saved(make)
