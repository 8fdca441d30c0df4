"""Environments that tests have played in other processes, on other machines. Imports no torch."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from environments import EchoEnv


class DrawingEnv(EchoEnv):
    """Observes what it draws from everything that there is to draw from, also when it is made."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__(lengths=(3, 5))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (6,), np.float64)
        self.bonus = random.random() + np.random.random()
        self.render_mode = "rgb_array"
        if folder is not None:
            Path(folder, str(os.getpid())).touch()

    def _observe(self, action: float) -> np.ndarray:
        drawn = [self.np_random.random(), random.random(), np.random.random()]
        return np.array([*drawn, self.action_space.sample(), self.bonus, action])

    def render(self) -> Any:
        return np.full((2, 2, 3), self.t, np.uint8)


class BadEnv(DrawingEnv):
    """Does something bad at its third step; the whole of its process, once, if it is to die."""

    def __init__(self, fault: str, folder: str) -> None:
        super().__init__(folder)
        self.fault = fault
        self.died = Path(folder, "died")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.fault == "raises at its second reset" and seed is None:
            raise ValueError("the ball won't come back")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.t == 3:
            if self.fault == "raises":
                raise ValueError("the ball left the universe")
            if self.fault == "is nan":
                observation[2] = np.nan
            if self.fault == "has another shape":
                observation = observation[:2]
            if self.fault == "can't be sent":
                info = {"lock": threading.Lock()}
            if self.fault == "hangs":
                signal.pause()
            if self.fault == "dies" and not self.died.exists():
                self.died.touch()
                os._exit(7)
        return observation, reward, terminated, truncated, info


class HandleError(Exception):
    """Can't be pickled with its handle, nor unpickled without: it takes two arguments."""

    def __init__(self, name: str, handle: Any) -> None:
        super().__init__(f"{name} is closed")
        self.handle = handle


class RaisingEnv(DrawingEnv):
    """Raises at its first step what it has been given the name of."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def step(self, action: Any) -> Any:
        if self.what == "interrupt":
            raise KeyboardInterrupt
        handle = threading.Lock() if self.what == "held" else None
        raise HandleError("the door", handle)


class ResetTogether(EchoEnv):
    """Each of its episodes begins once those of all have come to where they begin theirs."""

    def __init__(self, name: str, number: int, folder: str) -> None:
        super().__init__(lengths=(100,))
        self.name, self.number, self.folder = name, number, Path(folder)
        self.episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is None:  # those with seeds are asked for one by one
            self.episodes += 1
            (self.folder / f"{self.episodes}-{self.name}").touch()
            until = time.monotonic() + 20
            while len([*self.folder.glob(f"{self.episodes}-*")]) < self.number:
                if time.monotonic() > until:
                    raise TimeoutError("the others don't begin their episodes meanwhile")
                time.sleep(0.002)
        return super().reset(seed=seed)


class HeldEnv(EchoEnv):
    """Holds something that can't be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = threading.Lock()


class WhereEnv(EchoEnv):
    """Tells in its infos which process it is in, what is set there, and whether torch is."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, _ = super().reset(seed=seed)
        return observation, {
            "pid": os.getpid(),
            "torch": "torch" in sys.modules,
            "options": options,
            "variables": dict(os.environ),
        }
