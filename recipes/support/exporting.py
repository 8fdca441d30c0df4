"""A policy as a program of torch.export, which needs neither these recipes nor TorchRL.

Axes: B observations at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from support.errors import RecipeError

__all__ = ["export"]

_OBSERVATIONS = 64  # that both are tried on


class _Acting(nn.Module):
    """Observations ``[B, ...]`` to the likeliest actions ``[B, ...]``."""

    def __init__(self, policy: TensorDictModuleBase) -> None:
        super().__init__()
        self.policy = policy
        self._action = list(policy.out_keys).index("action")

    def forward(self, observation: Tensor) -> Tensor:
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            written = self.policy(observation=observation)
        return written[self._action] if isinstance(written, tuple) else written


def export(policy: TensorDictModuleBase, make_env: Callable[..., Any], file: Path) -> int:
    """Write a policy down, read it back, and compare its actions.

    ``torch.export.load(file).module()(observations)`` then gives the actions of observations
    ``[B, ...]``, B of any size.

    Args:
        policy: reads ``"observation"`` alone.
        make_env: makes an environment to take observations from.
        file: in .pt2.

    Returns:
        The number of observations that were compared.

    Raises:
        RecipeError: if the policy can't be exported, or acts in another way then, or its
            environment is none of gymnasium's.
    """
    if list(policy.in_keys) != ["observation"]:
        read = ", ".join(map(str, policy.in_keys))
        raise RecipeError(f"policies that read {read} can't be exported: only 'observation' is fed")
    acting = _Acting(policy).eval()
    observations = _observations(make_env)
    batch = {"observation": {0: torch.export.Dim("batch", min=1)}}
    try:
        with torch.no_grad():
            program = torch.export.export(
                acting, (), {"observation": observations}, dynamic_shapes=batch
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.export.save(program, file)
    except OSError:
        raise
    except Exception as error:  # torch raises whatever it stumbles over
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise RecipeError(f"torch.export can't export this policy: {said[0]}") from error
    loaded = torch.export.load(file).module()
    with torch.no_grad():
        for some in (observations, observations[:1]):
            if not torch.equal(acting(observation=some), loaded(observation=some)):
                file.unlink()
                raise RecipeError("the exported policy gives other actions: it was not kept")
    return len(observations)


def _observations(make_env: Callable[..., Any]) -> Tensor:
    """Of a game that is played at random."""
    env = make_env()
    if not isinstance(env, gym.Env):
        raise RecipeError("policies of gymnasium environments alone can be exported")
    env.action_space.seed(0)
    found = [env.reset(seed=0)[0]]
    while len(found) < _OBSERVATIONS:
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        found.append(env.reset()[0] if terminated or truncated else observation)
    env.close()
    return torch.from_numpy(np.stack(found))
