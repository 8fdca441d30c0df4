"""Saves and restores environments anywhere in an episode, and compares every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from torchrl_hts.env_state import restore_environment, save_environment

Make = Callable[[], gym.Env[Any, Any]]
Event = Any  # an action, or None for a reset without a seed


def plain(value: Any) -> Any:
    """Something that is equal only if every bit is; without the time that an episode took."""
    if isinstance(value, np.ndarray | np.generic):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key != "t"}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value.hex()
    return value


def play(env: gym.Env[Any, Any], events: list[Event]) -> list[Any]:
    """All that the environment returns."""
    return [plain(env.reset() if event is None else env.step(event)) for event in events]


def record(make: Make, steps: int, seed: int) -> tuple[list[Event], list[Any]]:
    """Random actions, and a reset at the end of each episode; what came of them."""
    env = make()
    env.reset(seed=seed)
    space, rng = env.action_space, np.random.default_rng(seed)
    events: list[Event] = []
    outputs: list[Any] = []
    for _ in range(steps):
        action: Any
        if isinstance(space, gym.spaces.Discrete):
            action = int(rng.integers(space.n))
        else:
            action = rng.uniform(space.low, space.high).astype(space.dtype)  # type: ignore[attr-defined]
        events.append(action)
        outputs.append(env.step(action))
        if outputs[-1][2] or outputs[-1][3]:
            events.append(None)
            outputs.append(env.reset())
    return events, plain(outputs)


def check_resumption(make: Make, steps: int, *, saves: int = 6, ends: bool = True) -> None:
    """What is saved anywhere goes on in a new environment; what was saved goes on as well."""
    seed = 3
    events, outputs = record(make, steps, seed)
    resets = [index for index, event in enumerate(events) if event is None]
    assert bool(resets) == ends
    points = {0, *np.random.default_rng(4).integers(1, len(events) - 20, saves).tolist()}
    for reset in resets[:1]:
        points |= {reset, reset + 1}  # after an episode's end, and after the reset that follows
    env = make()
    env.reset(seed=seed)
    states, last = {}, 0
    for point in sorted(points):
        assert play(env, events[last:point]) == outputs[last:point]
        states[point], last = save_environment(env), point
    assert play(env, events[last:]) == outputs[last:]
    for point, state in states.items():
        restored = make()
        restore_environment(restored, state)
        end = min(len(events), point + 400)
        assert play(restored, events[point:end]) == outputs[point:end], point


class Plain(gym.Env[Any, Any]):
    """One attribute."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
