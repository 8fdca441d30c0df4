"""save_environment and restore_environment: what is restored goes on bit for bit, or is refused."""

from __future__ import annotations

import io
import math
import os
import pickle
import random
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from resumption import Make, check_resumption, play, record

from torchrl_hts.env_state import CannotSaveError, restore_environment, save_environment
from torchrl_hts.env_state.pickles import NameFinder
from torchrl_hts.envs import make_atari


@pytest.mark.parametrize(
    ("env_id", "steps"),
    [
        ("CartPole-v1", 800),
        ("Acrobot-v1", 700),
        ("MountainCarContinuous-v0", 1100),
        ("Pendulum-v1", 500),
        ("Taxi-v4", 500),
        ("FrozenLake-v1", 300),
        ("Blackjack-v1", 200),
    ],
)
def test_environments_of_gymnasium(env_id: str, steps: int) -> None:
    if env_id not in gym.registry:
        env_id = env_id.replace("v4", "v3")
    check_resumption(partial(gym.make, env_id), steps)


def test_minatar() -> None:
    minatar = pytest.importorskip("minatar.gym")
    if "MinAtar/Breakout-v1" not in gym.registry:
        minatar.register_envs()
    check_resumption(partial(gym.make, "MinAtar/Breakout-v1"), 500)


def wrapped() -> gym.Env[Any, Any]:
    """Every wrapper with a state of its own, or with a function."""
    env: gym.Env[Any, Any] = wrappers.TimeLimit(gym.make("CartPole-v1"), 15)
    env = wrappers.RecordEpisodeStatistics(env)
    env = wrappers.StickyAction(env, 0.3)
    box = gym.spaces.Box(-9, 9, (4,), np.float32)
    env = wrappers.TransformObservation(env, lambda x: x * np.float32(3), box)
    env = wrappers.RescaleObservation(
        wrappers.TransformReward(env, lambda reward: reward * 0.7),
        np.full(4, -1, np.float32),
        np.full(4, 1, np.float32),
    )
    env = wrappers.DelayObservation(wrappers.NormalizeObservation(env), 2)
    env = wrappers.NormalizeReward(wrappers.TimeAwareObservation(env))
    return wrappers.FrameStackObservation(env, 3)


def test_wrappers() -> None:
    check_resumption(wrapped, 300)


class Colour(Enum):
    """A part of the state of `Intricate`."""

    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    """Another part."""

    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    """One that dataclasses pickles in a way of its own."""

    value: Any


class Intricate(gym.Env[Any, Any]):
    """Draws from all generators there are, and shares what it can; every step shows all of it."""

    def __init__(self) -> None:
        self.action_space = gym.spaces.Discrete(3)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (9,), np.float64)
        self.memory = np.zeros((4, 6)).transpose(1, 0) * 1.0  # owns memory in another order
        self.column = self.memory[1:, 2]  # shares it
        self.backwards = self.memory[::-2]
        self.record = np.zeros(3, [("a", "i4"), ("b", "f8")])
        self.field = self.record["b"]
        self.raw = bytearray(16)
        self.numbers = np.frombuffer(self.raw, np.uint8)
        self.unpickled = pickle.loads(pickle.dumps(np.ones(3), 5))
        self.objects = np.array([[], [], [], [], None], object)[:4].reshape(2, 2)
        self.objects[0, 0] = self.shared = [1]
        self.legacy = np.random.RandomState(5)
        self.python = random.Random(5)
        self.history: deque[float] = deque([0.0] * 3, maxlen=3)
        self.counts: Counter[int] = Counter()
        self.by_colour: defaultdict[Colour, list[int]] = defaultdict(list)
        self.ordered = OrderedDict(a=1)
        self.pair = Pair(self.shared, self.history)
        self.frozen = Frozen(self.shared)
        self.fraction = Fraction(1, 3)
        self.draw = self.python.random
        self.bound = self.advance
        self.here = Path("here")
        self.numpy = np

    def advance(self, by: float) -> None:
        """Change everything through one of its names."""
        self.column += by
        self.backwards[0] *= 0.5
        self.field[1] += by
        self.objects[0, 0].append(len(self.shared))
        self.raw[3] = (self.raw[3] + 1) % 256
        self.unpickled[1] += by
        self.pair.right.append(self.draw() + self.legacy.normal())
        self.counts[len(self.shared) % 3] += 1
        colour = Colour(1 + len(self.shared) % 2)
        self.by_colour[colour].append(len(self.by_colour))
        self.fraction += Fraction(1, 7)

    def observe(self) -> Any:
        """A digest of all of it."""
        return np.array(
            [
                self.memory.sum(axis=1) @ np.arange(6),
                self.record["b"].sum() + float(self.fraction),
                len(self.frozen.value) + len(self.pair.left) * 0.1,
                sum(self.history),
                self.np_random.normal() + self.python.gauss(0, 1),
                sum(self.counts.values()) + next(iter(self.counts), 0),
                sum(map(sum, self.by_colour.values())) + self.numbers.sum(),
                self.unpickled.sum(),
                float(self.observation_space.sample()[0]) + float(self.action_space.sample()),
            ]
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Keeps most of its state."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
            self.action_space.seed(seed)
        self.history.append(self.np_random.normal())
        return self.observe(), {}

    def step(self, action: int) -> Any:
        """Ends at random."""
        self.bound(action + 0.25)
        return self.observe(), self.history[0], bool(self.np_random.random() < 0.03), False, {}


class Onlooker(gym.Wrapper[Any, Any, Any, Any]):
    """Shares an array, a deque and a generator with the environment below."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        base: Any = env.unwrapped
        self.corner = base.memory[:2, :2]
        self.history = base.history
        self.generator = base.python

    def step(self, action: Any) -> Any:
        """Changes what lies below."""
        self.corner += 0.125
        self.history[0] += self.generator.random()
        return super().step(action)


def intricate() -> gym.Env[Any, Any]:
    """Closures with a state: a number that is rebound, a list, an array and a nested function."""
    count, seen, weights = 0, [0.0], np.ones(9)

    def scale(x: Any, memory: list[int] = [1]) -> Any:  # noqa: B006
        memory.append(len(memory))
        return x * weights + memory[-1]

    def transform(x: Any) -> Any:
        nonlocal count
        count += 1
        seen.append(float(x[0]))
        weights[count % 9] += 0.5
        return scale(x) + count + seen[-2]

    env = Onlooker(Intricate())
    return wrappers.TransformObservation(env, transform, env.observation_space)


def test_an_environment_of_the_users_with_every_kind_of_state() -> None:
    check_resumption(intricate, 300)


def test_attributes_that_came_and_went() -> None:
    env, restored = Intricate(), Intricate()
    env.later = [1, 2]  # type: ignore[attr-defined]
    del env.ordered
    restored.surplus = 1  # type: ignore[attr-defined]
    restore_environment(restored, save_environment(env))
    assert vars(restored).keys() == vars(env).keys()


def test_what_is_saved_along_stays_shared() -> None:
    env, restored = Intricate(), Intricate()
    history, corner, number = restore_environment(
        restored, save_environment(env, (env.history, env.memory[:2], 7))
    )
    assert history is restored.history
    assert np.shares_memory(corner, restored.memory)
    assert number == 7


@pytest.mark.parametrize("make", [intricate, wrapped])
def test_a_restored_environment_saves_the_same(make: Make) -> None:
    env, restored = make(), make()
    env.reset(seed=1)
    restore_environment(restored, save_environment(env))
    play(env, [0, 1, 0]), play(restored, [0, 1, 0])
    again = make()
    restore_environment(again, save_environment(restored))
    events = [1, 1, None, 0, 1, None, 1]
    assert play(again, events) == play(env, events)


def test_a_refusal_leaves_the_environment_as_it_was() -> None:
    events, outputs = record(intricate, 40, 3)
    env = intricate()
    env.reset(seed=3)
    env.unwrapped.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(CannotSaveError):
        save_environment(env)
    assert play(env, events) == outputs


# Another process

SCRIPT = """
import dataclasses, gymnasium as gym, numpy as np

@dataclasses.dataclass
class Ball:
    x: float = 0.0

def bounce(ball, speed=[1.0]):
    speed[0] *= -1.01
    ball.x += speed[0]

class Game(gym.Env):
    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (), np.float64)

    def __init__(self):
        self.ball, self.rule = Ball(), bounce

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ball = Ball(self.np_random.normal())
        return np.array(self.ball.x), {}

    def step(self, action):
        self.rule(self.ball)
        return np.array(self.ball.x), 0.0, abs(self.ball.x) > 2, False, {}

def make():
    return gym.wrappers.TransformObservation(Game(), lambda x: x * 2, Game.observation_space)
"""


def scripted() -> bytes:
    """A factory of a script, as executors get it: its classes can't be imported."""
    namespace: dict[str, Any] = {"__name__": "a_script"}
    exec(compile(SCRIPT, "a_script", "exec", dont_inherit=True), namespace)
    return cloudpickle.dumps(namespace["make"])


def elsewhere(path: str) -> None:
    """What the other process does: restore and play."""
    for factory, state, events, outputs in pickle.loads(Path(path).read_bytes()):
        env = pickle.loads(factory)()
        assert restore_environment(env, state) == {"length": 7}
        assert play(env, events) == outputs
    assert "torch" not in sys.modules


def test_a_new_process_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    options = {"terminal_on_life_loss": True, "sticky_actions": True}
    breakout = partial(make_atari, "ALE/Breakout-v5", **options)
    work = []
    for factory in (
        scripted(),
        *map(
            cloudpickle.dumps,
            (partial(gym.make, "CartPole-v1"), intricate, wrapped, breakout, make_atari),
        ),
    ):
        env = pickle.loads(factory)()
        env.reset(seed=0)
        actions = [int(a) for a in np.random.default_rng(0).integers(2, size=100)]
        play(env, actions[:4])
        state = save_environment(env, {"length": 7})
        events = [*actions[4:10], None, *actions[10:14], None, *actions[14:18]]
        work.append((factory, state, events, play(env, events)))
    path = tmp_path / "work"
    path.write_bytes(pickle.dumps(work))
    here = Path(__file__).parent
    paths = [here, here.parent / "support", here.parents[1]]
    subprocess.run(
        [sys.executable, "-c", "import sys, test_env_state as t; t.elsewhere(sys.argv[1])", path],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )


def test_what_a_large_table_names_is_looked_for_in_a_part_of_it() -> None:
    """Making an environment is to cost little, whatever it holds."""
    found = io.BytesIO()
    finder = NameFinder(found, {}, None)
    table = [{"row": (float(i), str(i))} for i in range(50_000)]
    for part in (table, {"function": math.sqrt}):
        finder.dump(part)
    assert finder.named == [math.sqrt]
    assert found.tell() < 1_000_000 < len(pickle.dumps(table))


# The way out: get_state and set_state
