"""What tests of the evaluator share: a game that pays what its policy says, and how to play it."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType
from torchrl.modules import GRUModule

from torchrl_hts._evaluation.evaluator import Evaluation, Evaluator

cart_pole = functools.partial(gym.make, "CartPole-v1")
RANDOM, GREEDY = ExplorationType.RANDOM, ExplorationType.DETERMINISTIC


class PayingEnv(gym.Env[Any, Any]):
    """Rewards with the action. How long it lasts, and its first observation, come from the seed."""

    def __init__(self, render_mode: str | None = None, bonus: float = 0.0) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Box(-100, 100, (1,), np.float32)
        self.render_mode, self.bonus = render_mode, bonus
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 12}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.last = 0, 0.0
        self.length = int(self.np_random.integers(2, 20))
        return self.observation_space.sample() * 0 + self.np_random.random(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.last = float(action[0])
        observation = self.np_random.random(2, np.float32)
        return observation, self.last + self.bonus, self.t == self.length, False, {}

    def render(self) -> np.ndarray:
        return np.full((24, 32, 3), 10 * self.t + self.last, np.uint8)


def remembers() -> TensorDictSequential:
    """A recurrent policy for `PayingEnv`, with new parameters; it carries ``"hidden"``, of 8."""
    return TensorDictSequential(
        GRUModule(2, 8, in_keys=["observation", "hidden", "is_init"],
                  out_keys=["embedding", ("next", "hidden")]),
        TensorDictModule(nn.Linear(8, 1), ["embedding"], ["action"]),
    )  # fmt: skip


class Pays(nn.Module):
    """Always acts with the value of its parameter; its buffer counts its calls."""

    def __init__(self, value: float, ballast: int = 0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value]))
        self.ballast = nn.Parameter(torch.zeros(ballast))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, observation: Tensor) -> Tensor:
        self.calls += 1
        return self.value.expand(len(observation), 1) + (self.calls if self.training else 0)


def pays(value: float = 1.0, ballast: int = 0) -> TensorDictModule:
    """A policy for PayingEnv."""
    return TensorDictModule(Pays(value, ballast), ["observation"], ["action"])


def set_value(policy: TensorDictModule, value: float) -> None:
    """Train the policy, so to say."""
    with torch.no_grad():
        policy.module.value.fill_(value)


def one(
    make_env: Callable[[], Any], policy: nn.Module, step: int = 0, **options: Any
) -> Evaluation:
    """A single evaluation."""
    with Evaluator(make_env, policy, **options) as evaluator:
        evaluator.submit(step)
        (evaluation,) = evaluator.wait()
    return evaluation


def saved(state: dict[str, Any]) -> Any:
    """A state as it comes back from a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
