"""What to do about a policy that doesn't fit its environment, as the end of a message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import Categorical, MultiOneHot, OneHot, TensorSpec

from torchrl_hts._executor.primers import primer_specs
from torchrl_hts._rounds.keys import Key, named

__all__ = ["on_action", "on_failure", "on_missing"]

_OF_MASKS = re.compile(r"boolean masks?", re.I)
_OF_DATA_TYPES = re.compile(r"dtype|same type|scalar type|data type|tensors? (of|for) .*type", re.I)


def on_action(spec: TensorSpec | None, found: tuple[int, ...]) -> str:
    """Of an action of another shape than its spec says, in a TorchRL environment.

    Args:
        spec: the action's, or None where there are several.
        found: shape of what the policy writes.
    """
    if isinstance(spec, OneHot) and found in ((), (1,)):
        return (
            ", one-hot. Make the environment with categorical_action_encoding=True (GymEnv, "
            "GymWrapper), or let the policy draw from torchrl.modules.OneHotCategorical"
        )
    if isinstance(spec, MultiOneHot):
        return (
            ", one-hot. If the policy writes indices, make the environment with "
            "categorical_action_encoding=True (GymEnv, GymWrapper)"
        )
    kind = type(spec)  # those below Categorical count otherwise
    if spec is not None and kind is Categorical and found == (*spec.shape, int(spec.n)):
        return (
            ", an index. Make the environment with categorical_action_encoding=False (GymEnv, "
            "GymWrapper), or let the policy draw from torch.distributions.Categorical"
        )
    return ""


def on_missing(key: Key, policy: TensorDictModuleBase) -> str:
    """Of an entry that the policy reads, and a TorchRL environment doesn't give."""
    if key[-1] == "is_init":
        return ". Add torchrl.envs.InitTracker() to the environment's transforms"
    if key in primer_specs(policy):
        return (
            ". It is a recurrent state: add torchrl.envs.InitTracker() and the recurrent module's "
            "make_tensordict_primer() to the environment's transforms"
        )
    return ""


def on_failure(
    error: Exception,
    policy: nn.Module,
    inputs: Mapping[Key, Tensor],
    space: gym.Space[Any] | None,
) -> str:
    """Of a policy that has failed, where the data types of its inputs may be why.

    Args:
        error: of the policy.
        policy: which has failed.
        inputs: what it was given, ``[count]``.
        space: the observation space of a gymnasium environment; None for one of TorchRL.
    """
    whole = [key for key, value in inputs.items() if not value.is_floating_point()]
    if _OF_MASKS.search(str(error)):
        masks = [key for key in whole if inputs[key].dtype != torch.bool]
        return f". {_names(masks)} of integers: let the policy make masks bool" if masks else ""
    if not _OF_DATA_TYPES.search(str(error)):
        return ""
    advice = ""
    for kind in (torch.float64, torch.float16):
        if others := [key for key, value in inputs.items() if value.dtype == kind]:
            name = str(kind).removeprefix("torch.")
            advice += f". {_names(others)} {name}: {_to_float32(others, inputs, space)}"
    kinds = {p.dtype for p in policy.parameters() if p.is_floating_point()} - {torch.float32}
    if kinds:
        names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        advice += f". Parameters of the policy are {names}: make them float32 with policy.float()"
    if advice:
        return advice
    return f". {_names(whole)} of integers: let the policy convert them first" if whole else ""


def _to_float32(
    others: list[Key], inputs: Mapping[Key, Tensor], space: gym.Space[Any] | None
) -> str:
    """How to have float32 in the place of another data type, as it can be pasted."""
    if space is None:
        if inputs[others[0]].dtype == torch.float64:
            return "add torchrl.envs.DoubleToFloat() to the environment's transforms"
        return "let the policy convert them first"
    if not isinstance(space, gym.spaces.Dict):
        return "make the environment gymnasium.wrappers.DtypeObservation(env, numpy.float32)"
    if any(len(key) > 1 for key in others):
        return "convert them in a gymnasium.ObservationWrapper, and in its observation_space"
    values = ", ".join(f"{key!r}: seen[{key!r}].astype('float32')" for (key,) in others)
    boxes = ", ".join(
        f"{key[0]!r}: gymnasium.spaces.Box(-numpy.inf, numpy.inf, {tuple(inputs[key].shape[1:])})"
        for key in others
    )
    return (
        "make the environment gymnasium.wrappers.TransformObservation(env, lambda seen: {**seen, "
        f"{values}}}, gymnasium.spaces.Dict({{**env.observation_space, {boxes}}}))"
    )


def _names(keys: list[Key]) -> str:
    return f"{', '.join(map(named, keys))} {'is' if len(keys) == 1 else 'are'}"
