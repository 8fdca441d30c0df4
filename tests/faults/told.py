"""An environment that is told where to fail, and how. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from environments import EchoEnv

LAST_WORDS = "the engine's last words"
ALWAYS = "always"  # instead of a marker: each time
NAP_S = 2.0
EPISODE = 5  # steps


def strike(fault: str) -> None:
    """Do something bad to this process; returns if the fault is one of values."""
    sys.stderr.write(f"{LAST_WORDS}\n")
    if fault == "raise":
        raise ValueError("the ball left the universe")
    if fault == "nap":
        time.sleep(NAP_S)
    if fault == "memory":
        raise MemoryError("no room for the ball")
    if fault == "segv":
        ctypes.string_at(0)
    if fault == "abort":
        os.abort()
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        os._exit(7)
    if fault == "hang":
        while True:
            signal.pause()
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    what, _, path = fault.partition(" ")
    if what == "tell":  # others who it is,
        Path(path).write_text(str(os.getpid()))
    if path and what == "kill":  # or kill who has told
        os.kill(int(Path(path).read_text()), signal.SIGKILL)


def first_time(marker: str) -> bool:
    """Whether nobody has asked with this file before; of many processes, one is told so."""
    if not marker or marker == ALWAYS:
        return bool(marker)
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class ToldEnv(EchoEnv):
    """Fails at one moment of its life, and only once however often it is made anew.

    Args:
        fault: what happens; see `strike`. ``"nan"``, ``"shape"``, ``"dtype"`` and ``"reward"``
            spoil what it returns instead.
        at: ``"make"``, ``"reset"``, ``"save"``, ``"close"``, or the number of a step of its life.
        marker: a file that is made when it happens.
    """

    def __init__(self, fault: str, at: str | int, marker: str) -> None:
        super().__init__((EPISODE,))
        self.fault, self.at, self.marker = fault, at, marker
        self.steps = 0
        self.engine = threading.Lock()  # which can't be pickled: its state is what it says it is
        self._meet("make")

    def _meet(self, moment: str | int) -> bool:
        """At the moment that it was told of: fail, or return True."""
        if moment != self.at or not first_time(self.marker):
            return False
        strike(self.fault)
        return True

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        result = super().reset(seed=seed, options=options)
        self._meet("reset")
        return result

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self.steps += 1
        if self._meet(self.steps - 1):
            if self.fault == "nan":
                observation[2] = np.nan
            elif self.fault == "shape":
                observation = observation[:2]
            elif self.fault == "dtype":
                observation = observation.astype("complex128")
            elif self.fault == "reward":
                reward = float("nan")
        return observation, reward, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        self._meet("save")
        return {name: vars(self)[name] for name in ("seed", "episode", "t", "steps")}

    def set_state(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def close(self) -> None:
        self._meet("close")
        super().close()
