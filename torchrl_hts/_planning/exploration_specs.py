"""Noise on a policy's actions that was made without their spec: it is that of the environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from torch import nn
from torchrl.data import Bounded, TensorSpec
from torchrl.modules import AdditiveGaussianModule

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._planning.fitted import Description
from torchrl_hts._rounds.keys import as_path

__all__ = ["give_specs"]


def give_specs(policy: nn.Module, description: Description) -> bool:
    """Give an ``AdditiveGaussianModule`` without a spec that of the environment's actions.

    TorchRL's collectors do so, and its trainers make such modules.

    Returns:
        Whether one was given.
    """
    given = False
    for module in policy.modules():
        if isinstance(module, AdditiveGaussianModule) and module.spec is None:
            spec = _spec(description, module.action_key)
            if spec is not None:
                module.spec, given = spec, True
    return given


def _spec(description: Description, key: Any) -> TensorSpec | None:
    """Of the actions, without batch dimensions; None if noise can't be added to them."""
    if not isinstance(description, GymDescription):
        return description.specs["input_spec", "full_action_spec"].get(key, None)
    space: Any = description.action_space
    for name in as_path(key)[1:]:
        space = space.spaces.get(name) if isinstance(space, gym.spaces.Dict) else None
    if not isinstance(space, gym.spaces.Box):
        return None
    low, high = torch.from_numpy(space.low.copy()), torch.from_numpy(space.high.copy())
    return Bounded(low, high, space.shape, dtype=low.dtype)
