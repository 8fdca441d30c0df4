"""Whether a worker that has failed is replaced, and how often that has been done."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

__all__ = ["Restarts"]


@dataclass
class Restarts:
    """The user's choice, and what it has come to.

    Attributes:
        enabled: whether failed workers are replaced at all.
        most: so many replacements
        window_s: within so many seconds, and no more.
        by_kind: replacements so far, of ``"executor"`` and of ``"actor"``.
        by_env: for each environment, how often its executor has been replaced.

    Example:
        >>> restarts = Restarts(enabled=True, most=2, window_s=60.0)
        >>> [restarts.allows(now) for now in (0.0, 50.0, 59.0, 61.0)]
        [True, True, False, True]
    """

    enabled: bool = False
    most: int = 10
    window_s: float = 600.0
    by_kind: Counter[str] = field(default_factory=Counter)
    by_env: Counter[int] = field(default_factory=Counter)
    _times: deque[float] = field(default_factory=deque)

    def allows(self, now: float) -> bool:
        """Whether one more worker may be replaced, which then counts."""
        if not self.enabled:
            return False
        while self._times and now - self._times[0] >= self.window_s:
            self._times.popleft()
        if len(self._times) >= self.most:
            return False
        self._times.append(now)
        return True

    def count(self, kind: str, envs: tuple[int, ...]) -> None:
        """A worker of a kind, and of these environments, is replaced."""
        self.by_kind[kind] += 1
        if kind == "executor":
            self.by_env.update(envs)
