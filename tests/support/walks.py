"""Gymnasium environments to be filmed, and to fail: ``walks:Walk-v0``, ``walks:Raises-v0`` ..."""

from __future__ import annotations

import math
import os
import random
from typing import Any

import gymnasium as gym
import numpy as np

FIRST_SEED = 3141116543  # of environment 2 of a run of seed 0
LAST_SEED = 2613022947  # of its environment 3
STEP = 40 * 16 + 5  # in round 40 of a run with an alpha of 16
# How one of them fails: which by its seed, and after how many steps.
FAULTS = {
    "raises": (FIRST_SEED, STEP),
    "raises at once": (FIRST_SEED, 3),
    "exits": (LAST_SEED, STEP),
    "is lost": (LAST_SEED, STEP),
}
NO_PACKAGE = gym.error.DependencyNotInstalled("glass is not installed, run `pip install glass`")


class Walk(gym.Env[Any, Any]):
    """Up or down, as the action and the process's own generators say.

    Args:
        render_mode: ``"rgb_array"``, ``"human"`` or None.
        fault: one of `FAULTS`, or "".
    """

    metadata = {"render_modes": ["rgb_array", "human"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, fault: str = "") -> None:
        self.action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.render_mode, self.fault = render_mode, fault
        self.first_seed: int | None = None
        self.steps = 0

    def _observe(self) -> np.ndarray:
        return np.array([self.place, self.luck, self.left], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.first_seed, self.steps = seed, 0
        self.place, self.luck = 0.0, random.random()
        self.left = 5 + int(self.np_random.integers(30))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.left -= 1
        self.place += self.luck * (2 * int(action) - 1) + float(np.random.normal())
        if self.fault:
            self._fail(*FAULTS[self.fault])
        return self._observe(), self.place, self.left == 0, False, {}

    def _fail(self, seed: int, step: int) -> None:
        if self.first_seed != seed or self.steps <= step:
            return
        if self.fault.startswith("raises"):
            raise ValueError(f"the wing came off at {self.place}")
        if self.fault == "exits":
            os._exit(3)
        self.place = math.nan

    def render(self) -> Any:
        if self.render_mode == "rgb_array":
            return np.full((48, 64, 3), int(abs(10 * self.place)) % 256, np.uint8)
        return None


class Raises(Walk):
    """The one that raises."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode, "raises")


class Bursts(Walk):
    """On rank 1 its rewards are so large that their squares are infinite."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        if os.environ.get("RANK") == "1" and self.steps > 20:
            reward = 1e30
        return observation, reward, *rest


class Fades(Walk):
    """Its pictures end before its episodes do."""

    def render(self) -> Any:
        if self.steps > 3:
            raise ValueError("the light has gone")
        return super().render()


class Blind(Walk):
    """No driver draws it."""

    def render(self) -> Any:
        raise RuntimeError("no OpenGL context\nwas made")


class Windowless(Walk):
    """It can be shown in no window, and tells of it by an error or ends its process."""

    def __init__(self, render_mode: str | None = None, error: Exception | None = None) -> None:
        super().__init__(render_mode)
        self.error = error

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.render_mode == "human":
            if self.error is None:
                os._exit(3)
            raise self.error
        return super().reset(seed=seed, options=options)


def falls(**_: Any) -> gym.Env[Any, Any]:
    """None is ever made."""
    raise OverflowError("there is no ground")


gym.register("Walk-v0", Walk)
gym.register("Blind-v0", Blind)
gym.register("Bursts-v0", Bursts)
gym.register("Fades-v0", Fades)
gym.register("Falls-v0", falls)
gym.register("Raises-v0", Raises)
gym.register("NoWindow-v0", Windowless, kwargs={"error": RuntimeError("there is no display :0")})
gym.register("NoPackage-v0", Windowless, kwargs={"error": NO_PACKAGE})
gym.register("NoGlass-v0", Windowless)
gym.register("RaisesAtOnce-v0", Walk, kwargs={"fault": "raises at once"})
gym.register("Exits-v0", Walk, kwargs={"fault": "exits"})
gym.register("IsLost-v0", Walk, kwargs={"fault": "is lost"})
