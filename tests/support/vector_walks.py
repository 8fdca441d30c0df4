"""An environment that draws, alone and in batches, and rounds of it as an executor writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from rows import WRITES_ALL, assert_equal_bits, memory_for, play_round

from torchrl_hts._executor.gym_env import GymEnvironment, RowOptions
from torchrl_hts._executor.vector_env import VectorEnvironment
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array, Field

K, ROUNDS = 5, 8
INDEX = Field(("action",), (), "int64")
MODES = list(AutoresetMode)


class Walk(gym.Env[Any, Any]):
    """Goes where it is sent, and a bit elsewhere; ends in either way, after a few steps."""

    def __init__(self, action_space: Any = None, *, nested: bool = False) -> None:
        self.action_space = action_space or Discrete(3, start=1)
        box = Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space: Any = box
        self.nested = nested
        if nested:
            self.observation_space = gym.spaces.Dict(
                {"place": gym.spaces.Dict({"now": box}), "room": Discrete(9)}
            )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=3)
        self.steps = 0
        return self._observation(), {"lives": 3}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.place = self.place + np.sum(action) + self.np_random.normal(size=3)
        terminated = bool(self.np_random.random() < 0.2)
        truncated = bool(self.np_random.random() < 0.1)
        info: dict[str, Any] = {"lives": int(self.np_random.integers(3))}
        if terminated or truncated:
            info["episode"] = {"r": float(self.place[0])}
        return self._observation(), float(self.place.sum()), terminated, truncated, info

    def _observation(self) -> Any:
        place = self.place.astype(np.float32)
        return {"place": {"now": place}, "room": self.steps % 9} if self.nested else place


def indices(t: int, rng: np.random.Generator) -> dict[Key, Array]:
    return {("action",): rng.integers(3, size=K)}


def play(
    environments: list[Any],
    units: list[int],
    options: RowOptions = WRITES_ALL,
    action: Field = INDEX,
    act: Callable[[int, np.random.Generator], dict[Key, Array]] = indices,
    more: tuple[Field, ...] = (),
) -> list[dict[Key, Array]]:
    """Some rounds from new episodes on."""
    memory = memory_for(environments[0].description.observation_space, action, units, options,
                        more=more)  # fmt: skip
    seeds = iter(range(100, 100 + K))
    for environment, size in zip(environments, units, strict=True):
        environment.bind(memory, options)
        own = [next(seeds) for _ in range(size)]
        environment.reset(own if isinstance(environment, VectorEnvironment) else own[0], 0)
    rng = np.random.default_rng(0)
    return [play_round(environments, memory, lambda t: act(t, rng)) for _ in range(ROUNDS)]


def singles(make: Callable[[], Any] = Walk) -> list[Any]:
    return [GymEnvironment(make(), index) for index in range(K)]


def batch(make: Callable[[], Any] = Walk, mode: AutoresetMode = MODES[0], k: int = K) -> Any:
    return VectorEnvironment(SyncVectorEnv([make] * k, autoreset_mode=mode), 0)


def assert_same(one: list[dict[Key, Array]], other: list[dict[Key, Array]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert_equal_bits(mine, theirs)


def bound(env: VectorEnv[Any, Any, Any], options: RowOptions = WRITES_ALL) -> Any:
    environment = VectorEnvironment(env, 0)
    memory = memory_for(environment.description.observation_space, INDEX, [env.num_envs], options)
    environment.bind(memory, options)
    return environment, memory
