"""Environments that play in the background, and insist on it. Imports no torch."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from environments import EchoEnv

from torchrl_hts._executor.background_env import BackgroundEnv


class BackgroundEcho(EchoEnv, BackgroundEnv):
    """Insists on it that what happens was begun, and refuses every `direct`-th beginning."""

    def __init__(self, direct: int = 1000, fails_at: int = 1000, dies: bool = False) -> None:
        super().__init__(lengths=(3, 5))
        self.direct = direct
        self.fails_at = fails_at
        self.dies = dies
        self.steps = 0
        self.expected: Any = None

    def begin_reset(self, seed: int | None) -> bool:
        self.expected = ("reset", seed)
        return False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        assert seed is None or self.expected == ("reset", seed)
        self.expected = None
        return super().reset(seed=seed)

    def begin_step(self, action: Any) -> bool:
        assert self.expected is None
        self.steps += 1
        if self.steps == self.fails_at:
            if self.dies:
                os._exit(7)
            raise OSError("the ball is lost")
        if self.steps % self.direct == 0:
            self.expected = None
            return False
        self.expected = ("step", super().step(action))
        return True

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.expected is None:
            assert self.steps % self.direct == 0, "it was not begun"
            return super().step(action)
        (kind, outcome), self.expected = self.expected, None
        assert kind == "step"
        assert outcome[0][3] == action
        return outcome  # type: ignore[no-any-return]


class TellingEcho(BackgroundEcho):
    """Insists on it that nobody waits for a step: its end is told first.

    A thread tells. Of all that wait to be told it takes any, those that began last among them.
    """

    tells = True
    waiting: ClassVar[Any] = queue.SimpleQueue()
    teller: ClassVar[threading.Thread | None] = None

    def __init__(self, direct: int = 1000, fails_at: int = 1000, dies: bool = False) -> None:
        super().__init__(direct, fails_at, dies)
        self.is_over = False

    def begin_step(self, action: Any) -> bool:
        self.is_over = False
        return super().begin_step(action)

    def tell_when_over(self, tell: Callable[[], None]) -> None:
        if TellingEcho.teller is None:  # in this process
            TellingEcho.teller = threading.Thread(target=self.tell_all, daemon=True)
            TellingEcho.teller.start()
        self.waiting.put((self, tell))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.is_over or self.expected is None
        return super().step(action)

    @classmethod
    def tell_all(cls) -> None:
        draws, held = random.Random(0), []
        while True:
            while not held or not cls.waiting.empty():
                held.append(cls.waiting.get())
            env, tell = held.pop(draws.randrange(len(held)))
            env.is_over = True
            tell()


class HangingEcho(BackgroundEcho):
    """Leaves a file when it has begun its 15th step, and never ends it."""

    tells = True

    def __init__(self, begun: Path) -> None:
        super().__init__()
        self.begun = begun

    def tell_when_over(self, tell: Callable[[], None]) -> None:
        if self.steps == 15:
            self.begun.touch()
        else:
            tell()
