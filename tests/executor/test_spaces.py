"""Spaces are each environment's own, and seeded with it, wherever it has them from."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from probe import has_drawn

from torchrl_hts._executor.spaces import own_spaces, seed_spaces
from torchrl_hts.envs.drawing import DrawingEnv

LIMITS = gym.spaces.Discrete(1000)


class Shared(gym.Wrapper[Any, Any, Any, Any]):
    """Has a space of its module."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.limits = LIMITS
        self.pool = [LIMITS, {"other": (gym.spaces.Discrete(1000),)}]


def test_spaces_are_each_environments_own() -> None:
    envs = [Shared(DrawingEnv()) for _ in range(3)]
    for env in envs:
        own_spaces(env)
    for env, seed in zip(envs, (1, 2, 1), strict=True):
        seed_spaces(env, seed)
    drawn = [
        [[space.sample().tolist() for _ in range(20)] for space in (env.limits, env.action_space)]
        for env in envs
    ]
    assert drawn[0] == drawn[2] != drawn[1]
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
    others = [[env.pool[1]["other"][0].sample().item() for _ in range(20)] for env in envs]
    assert others[0] == others[2] != others[1], "in containers too"
    assert all(env.pool[0] is env.limits for env in envs), "what was one space stays one"
    assert not has_drawn(LIMITS), "the module's is left alone"
    assert not has_drawn(DrawingEnv.action_space)
