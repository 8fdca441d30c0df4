"""Play football at random."""

from __future__ import annotations

from typing import Any

import gymnasium as gym


def play(env: gym.Env[Any, Any], steps: int, actions: Any) -> list[Any]:
    """Steps with random actions, on over the ends of episodes; all that the environment gives."""
    trace: list[Any] = []
    for _ in range(steps):
        action = actions.integers(19, size=env.action_space.shape)
        observation, reward, terminated, truncated, info = env.step(action)
        trace.append((observation.tobytes(), reward, terminated, truncated, str(info)))
        if terminated or truncated:
            observation, info = env.reset()
            trace.append((observation.tobytes(), str(info)))
    return trace
