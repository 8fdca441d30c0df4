"""Environments of any spaces."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase


class OfSpaces(gym.Env[Any, Any]):
    """A gymnasium environment; observes what its space draws, and ends each fifth step."""

    def __init__(self, observation: gym.Space[Any], action: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps % 5 == 0, False, {}


class OfSpecs(EnvBase):
    """A TorchRL environment, which observes zeros and doesn't end."""

    def __init__(self, observation: TensorSpec, action: TensorSpec) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=observation)
        self.action_spec, self.reward_spec = action, Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        return TensorDict({"observation": self.observation_spec["observation"].zero()})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict({**self._reset(None), "reward": torch.ones(1), "done": done})

    def _set_seed(self, seed: int | None) -> None:
        pass
