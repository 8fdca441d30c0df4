"""Whether a policy's actions fit the environment's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._planning.policy_advice import on_action
from torchrl_hts._rounds.keys import Key, named

__all__ = ["action_sizes", "check_gym_action", "check_torchrl_action"]


def check_gym_action(space: gym.Space[Any], key: Key, outputs: Mapping[Key, Tensor]) -> None:
    """Raise unless a policy writes actions of a space.

    Args:
        space: of a gymnasium environment, or a part of it.
        key: of its actions.
        outputs: what the policy writes, ``[count, ...]``.

    Raises:
        TypeError: for a space of another kind than those that are supported.
        ValueError: if the action is missing, or of another size or data type.
    """
    if isinstance(space, gym.spaces.Dict):
        for name, child in space.spaces.items():
            check_gym_action(child, (*key, name), outputs)
        return
    sizes = action_sizes(space)
    _expect_action(key, outputs)
    if outputs[key].dtype == torch.bfloat16:
        raise ValueError(
            f"the policy writes {named(key)} in bfloat16, which numpy, and so a gymnasium "
            "environment, does not know: let its distribution work in float32"
        )
    found = outputs[key][0].numel()
    if found not in sizes:
        raise ValueError(
            f"the policy writes {named(key)} with {found} element(s) per environment; the "
            f"environment's {space} needs {' or '.join(map(str, sizes))}"
        )


def action_sizes(space: gym.Space[Any]) -> tuple[int, ...]:
    """How many numbers an action of a space may have: as an index, or one-hot.

    Raises:
        TypeError: for a space of another kind than those that are supported.
    """
    if isinstance(space, gym.spaces.Discrete):
        return (1, int(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return (int(space.nvec.size), int(space.nvec.sum()))
    if isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
        return (int(np.prod(space.shape)),)
    raise TypeError(
        f"the action space has a {type(space).__name__}; supported are Discrete, MultiDiscrete, "
        "MultiBinary, Box and Dicts of them. Turn it into one of these with "
        "gymnasium.wrappers.TransformAction"
    )


def check_torchrl_action(description: TorchRLDescription, outputs: Mapping[Key, Tensor]) -> None:
    """Raise ValueError unless a policy writes the actions of a TorchRL environment.

    Args:
        description: of the environment.
        outputs: what the policy writes, ``[count, ...]``.
    """
    for key in description.action_keys:
        _expect_action(key, outputs)
        expected = description.transition.get(key).shape
        found = outputs[key].shape[1:]
        spec = description.specs[("input_spec", "full_action_spec", *key)]
        if found != expected:
            raise ValueError(
                f"the policy writes {named(key)} of shape {tuple(found)}; the environment's "
                f"action spec has {tuple(expected)}{on_action(spec, tuple(found))}"
            )


def _expect_action(key: Key, outputs: Mapping[Key, Tensor]) -> None:
    if key not in outputs:
        raise ValueError(
            f"the policy does not write the environment's action {named(key)}; it writes "
            f"{', '.join(map(named, outputs)) or 'nothing'}"
        )
