"""Environments that are refused, the message that says so, and its advice as a user follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from collectors import start
from environments import EchoEnv
from policies import marked
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import Transform

from torchrl_hts import WorkerError

MOST_CHARACTERS = 400  # of a message, without the traceback of a worker
BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
ZEROS = np.zeros(2, np.float32)


class Odd(EchoEnv):
    """Observes `seen`, for its space; rewards with `reward`."""

    def __init__(self, space: gym.Space[Any], seen: Any, reward: Any = 1.0) -> None:
        super().__init__()
        self.observation_space, self.seen, self.given = space, seen, reward

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**kwargs)
        return self.seen, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        _, _, *rest = super().step(action)
        return self.seen, self.given, *rest  # type: ignore[return-value]


def gather(
    make: Callable[[], Any], policy: nn.Module | None = None, copies: int = 1, **kwargs: Any
) -> Any:
    """The first batch of one environment, or of several alike."""
    collector = start([make] * copies, policy or marked(), num_executors=1, num_actors=1, **kwargs)
    try:
        return next(iter(collector)).clone()
    finally:
        collector.shutdown()


def refusal(make: Callable[[], Any], policy: nn.Module | None = None, **kwargs: Any) -> str:
    """The message with which it is refused."""
    with pytest.raises((TypeError, ValueError, WorkerError)) as caught:
        gather(make, policy, **kwargs)
    said = str(caught.value)
    if isinstance(caught.value, WorkerError):
        said = caught.value.remote_traceback.splitlines()[-1]
    prose = said.split("gymnasium.wrappers")[0]  # what follows may be a line to paste
    assert len(prose) < MOST_CHARACTERS, said
    return said


def shown(message: str, after: str) -> str:
    """The line of code that a message ends with."""
    assert f" {after} " in message, message
    return message.split(f" {after} ")[1]


def pasted(line: str, env: gym.Env[Any, Any]) -> Any:
    """What a line makes of an environment."""
    return eval(line, {"env": env, "gymnasium": gym, "numpy": np})


class Says(Transform):
    """Adds an entry to what an environment gives, with a spec or without one."""

    def __init__(self, what: Any, spec: TensorSpec | None = None) -> None:
        super().__init__()
        self.what, self.spec = what, spec

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("said", self.what)

    def _reset(self, tensordict: Any, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        if self.spec is not None:
            observation_spec["said"] = self.spec
        return observation_spec
