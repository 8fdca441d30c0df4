"""A TorchRL environment itself is taken as one of its copies."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from collectors import one_batch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import (
    EnvBase,
    GymEnv,
    ObservationNorm,
    PendulumEnv,
    StepCounter,
    Transform,
    TransformedEnv,
    VecNormV2,
)

from torchrl_hts import Evaluator
from torchrl_hts._executor.copied_env import Copied

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]

SINGLE = partial(GymEnv, "Pendulum-v1")


@pytest.fixture
def env() -> EnvBase:
    """Whose statistics were measured once, as TorchRL's tutorial of PPO does it."""
    env = TransformedEnv(SINGLE(), ObservationNorm(in_keys=["observation"]))
    env.transform.init_stats(20)
    return env.append_transform(StepCounter(max_steps=3))


def test_it_gives_what_a_factory_of_it_gives(env: EnvBase) -> None:
    assert (one_batch([env]) == one_batch([lambda: env])).all()
    three = one_batch([env] * 3)
    assert three.shape == (3, 4)
    assert (three == one_batch(env, num_workers=3)).all()


class Drawing(EnvBase):
    """Draws from generators that its constructor has made, and that no seed reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((3,)))
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))
        self.mine = np.random.default_rng(np.random.randint(2**30))
        self.other, self.third = np.random.RandomState(), random.Random()
        self.fourth = torch.Generator()

    def drawn(self) -> torch.Tensor:
        drawn = [self.mine.random(), self.other.rand(), self.third.random()]
        return torch.tensor(drawn) + torch.rand(3, generator=self.fourth)

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        return TensorDict({"observation": self.drawn()}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        ended = {"done": torch.zeros(1, dtype=torch.bool), "reward": torch.zeros(1)}
        return TensorDict({"observation": self.drawn(), **ended}, [])

    def _set_seed(self, seed: int | None) -> None: ...


class Noise(Transform):
    """Draws from a generator that its constructor has made."""

    def __init__(self) -> None:
        super().__init__(in_keys=["observation"], out_keys=["observation"])
        self.mine = np.random.default_rng(0)

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value.round() + torch.from_numpy(self.mine.random(3)).float()

    def _reset(self, tensordict: Any, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)


class Within:
    """A simulator, or a wrapper around one."""

    def __init__(self, sim: Any) -> None:
        self.sim = sim

    def drawn(self) -> torch.Tensor:
        return self.sim.drawn()


class Simulated(Drawing):
    """Draws by what lies deep within."""

    def __init__(self) -> None:
        super().__init__()
        self.simulators = {"first": [Within(Within(Drawing()))]}

    def drawn(self) -> torch.Tensor:
        return self.simulators["first"][0].drawn()


@pytest.mark.parametrize(
    "wrap",
    [lambda env: env, lambda env: TransformedEnv(env, Noise()), lambda env: Simulated()],
)
def test_each_copy_draws_for_itself_by_the_seed(wrap: Any) -> None:
    env = wrap(Drawing())
    first, again = one_batch([env] * 3), one_batch([env] * 3)
    assert (first == again).all()
    assert (first == one_batch([env] * 3, num_executors=3)).all()
    values = first["observation"].flatten()
    assert len(values.unique()) == len(values)
    assert (first["observation"] != one_batch([env] * 3, seed=1)["observation"]).all()


def test_copies_of_what_generators_are_made_of() -> None:
    """Shared ones stay shared; those of a class of one's own keep what they have."""

    class Dice(random.Random):
        def __init__(self, sides: int) -> None:
            super().__init__()
            self.sides = sides

    env = Drawing()
    bits = np.random.PCG64(3)
    env.made_of = [bits, np.random.Generator(bits), np.random.SeedSequence(3), Dice(6)]
    copied = Copied(env)
    np.random.seed(0)
    first, second = copied().made_of, copied().made_of
    assert first[1].bit_generator is first[0]
    assert first[0].random_raw() != second[0].random_raw()
    assert first[2].entropy != second[2].entropy
    assert (first[3].sides, second[3].sides) == (6, 6)
    assert first[3].random() != second[3].random()


@pytest.mark.parametrize("make", [PendulumEnv, Drawing])
def test_others_than_wrappers_are_taken(make: type[EnvBase]) -> None:
    """Which are closed from their start on, by TorchRL's flag."""
    env = TransformedEnv(make(), StepCounter())
    assert one_batch(env).shape == (12,)
    assert one_batch([make()] * 2).shape == (2, 6)


def test_it_is_left_as_it_is(env: EnvBase) -> None:
    env.set_seed(0)
    first = env.reset()
    after = env.step(first.set("action", torch.zeros(1)))["next"]
    env.set_seed(0)
    again = env.reset()
    one_batch(env)
    assert (env.step(again.set("action", torch.zeros(1)))["next"] == after).all()


def test_it_is_evaluated_and_beside_factories(env: EnvBase) -> None:
    with Evaluator(env, None, num_episodes=2) as evaluator:
        evaluator.submit(0)
        assert evaluator.wait()[0].lengths == (3, 3)
    assert one_batch([env, lambda: env]).shape == (2, 6)


def test_statistics_that_stay_in_the_copy_are_told(env: EnvBase) -> None:
    normalised = TransformedEnv(env, VecNormV2(in_keys=["observation"]))
    with pytest.warns(UserWarning, match="the VecNormV2 in create_env_fn are counted by") as found:
        one_batch(normalised)
    assert found[0].filename == __file__


def test_what_cant_be_copied_is_refused_by_name(env: EnvBase) -> None:
    env.lock = threading.Lock()
    said = r"create_env_fn\[1\] is a TransformedEnv that can't be copied"
    with pytest.raises(TypeError, match=said):
        one_batch([SINGLE, env])
    env.close()
    with pytest.raises(ValueError, match="that is closed: give one that is not"):
        one_batch(env)
    with pytest.raises(TypeError, match="create_env_kwargs are for callables"):
        one_batch(SINGLE(), create_env_kwargs={"frame_skip": 2})
