"""Environments that tests have played in threads of an executor. Imports no torch."""

from __future__ import annotations

import functools
import os
import queue
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from environments import EchoEnv


class OwnDraws(EchoEnv):
    """Observes what it draws from its own generators, in one array; all calls in one thread.

    What it draws while it is made may be of the process's generators.
    """

    def __init__(self) -> None:
        super().__init__(lengths=(3, 5))
        self.bonus = random.random() + np.random.random()
        self.local = threading.local()
        self.local.is_here = True
        self.observation = np.zeros(4)

    def _observe(self, action: float) -> np.ndarray:
        assert self.local.is_here
        drawn = self.np_random.random(), self.action_space.sample()
        self.observation[:] = [*drawn, self.bonus + self.t, action]
        return self.observation

    def get_state(self) -> Any:
        assert self.local.is_here
        spaces = self.action_space.np_random.bit_generator.state
        own = self.t, self.episode, self.seed, self.bonus, self.observation.copy()
        return self.np_random.bit_generator.state, spaces, own

    def set_state(self, state: Any) -> None:
        assert self.local.is_here
        generator, spaces, own = state
        self.np_random.bit_generator.state = generator
        self.action_space.np_random.bit_generator.state = spaces
        self.t, self.episode, self.seed, self.bonus, observation = own
        self.observation[:] = observation

    def close(self) -> None:
        assert self.local.is_here


class Reusing(EchoEnv):
    """Writes all that a step or a reset returns where the last one's is, the observation apart."""

    def __init__(self) -> None:
        super().__init__(lengths=(3, 5))
        self.reward = np.zeros(())
        self.over = np.zeros((), bool)
        self.info: dict[str, Any] = {"won": [0.0]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.reward[...] = self.over[...] = self.info["won"][0] = 0
        return super().reset(seed=seed)[0], self.info

    def step(self, action: Any) -> Any:
        observation, self.reward[...], self.over[...], truncated, _ = super().step(action)
        self.info["won"][0] = float(self.over)
        return observation, self.reward, self.over, truncated, self.info


class Together(EchoEnv):
    """Steps, and resets that follow them, end once all of its process have begun theirs."""

    barrier: ClassVar[threading.Barrier | None] = None
    lock = threading.Lock()

    def __init__(self, parties: int, length: int) -> None:
        super().__init__(lengths=(length,))
        with self.lock:
            if Together.barrier is None:
                Together.barrier = threading.Barrier(parties)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert self.barrier is not None
        if seed is None:
            self.barrier.wait(120)
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        assert self.barrier is not None
        self.barrier.wait(120)
        return super().step(action)


class ClosedTogether(EchoEnv):
    """Its close ends once three of its process have begun theirs; it leaves a file in a folder."""

    barrier = threading.Barrier(3)

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def close(self) -> None:
        self.barrier.wait(120)
        Path(self.folder, str(id(self))).touch()


class Faulty(EchoEnv):
    """Does something bad at its third step."""

    def __init__(self, fault: str) -> None:
        super().__init__(lengths=(100,) if fault != "raises at its second reset" else (3,))
        self.fault = fault

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.fault == "raises at its second reset" and seed is None:
            raise ValueError("the ball won't come back")
        if self.fault == "draws at its reset":
            random.random()
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        outcome = super().step(action)
        if self.t == 3:
            self._fail()
        return outcome

    def _fail(self) -> None:
        if self.fault == "raises":
            raise ValueError("the ball left the universe")
        if self.fault == "exits":
            sys.exit(3)
        if self.fault == "dies":
            os._exit(7)
        if self.fault == "hangs":
            threading.Event().wait()
        if self.fault == "forks" and (pid := os.fork()):
            os.waitpid(pid, 0)
        elif self.fault == "forks":
            sys.exit()
        if self.fault == "draws from random":
            random.random()
        if self.fault == "draws from np.random":
            np.random.random()
        if self.fault == "puts np.random back":
            state = np.random.get_state()
            np.random.random()
            np.random.set_state(state)
        if self.fault == "puts random back":
            before = random.getstate()
            random.random()
            random.setstate(before)
        if "torch" in self.fault:
            import torch

            with torch.random.fork_rng(enabled="back" in self.fault):
                torch.rand(1)


class Interrupting(EchoEnv):
    """Has its process interrupted in its first step, which goes on until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    def step(self, action: Any) -> Any:
        if not self.end.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            self.end.wait(60)
        return super().step(action)

    def close(self) -> None:
        raise queue.Empty


@functools.cache
def the_same() -> EchoEnv:
    """One environment at each call."""
    return EchoEnv()
