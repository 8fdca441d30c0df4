"""Rows to try a policy with: random ones of all that there is, and what an environment gave.

Axes: m observed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.observations import observation_fields
from torchrl_hts._executor.primers import first_value, primer_specs
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._executor.trial_observations import Observations
from torchrl_hts._executor.values import ARRAY_SPACES
from torchrl_hts._policy.trial_inputs import TrialInputs
from torchrl_hts._rounds.entries import check_fixed_shapes, leaves
from torchrl_hts._rounds.keys import Key, as_path, named
from torchrl_hts._rounds.shared_memory import Array

__all__ = ["MadeUp", "make_up", "trial_inputs"]

_EXAMPLES = 512  # rows; how many are needed is for the calibration to say
_EXAMPLE_BYTES = 1 << 25  # but no more than this, however large an observation is
_DONE_NAMES = ("done", "terminated", "truncated")


@dataclass(frozen=True)
class MadeUp:
    """Random values of all that there is where an episode starts.

    Attributes:
        root: TensorDict ``[count]``.
        first: by key, the number that a primer of the policy sets an entry to, in a gymnasium
            environment.
        kept: keys of what is handed on from step to step as the policy leaves it.
    """

    root: TensorDict
    first: dict[Key, float]
    kept: set[Key]


def make_up(
    description: GymDescription | TorchRLDescription,
    policy: TensorDictModuleBase,
    num_envs: int,
    max_frames: int,
) -> MadeUp:
    """Draw from torch's generator, and an environment's spaces.

    Args:
        description: of the environment.
        policy: whose primers are looked at.
        num_envs: N; there are at least twice as many rows.
        max_frames: length at which episodes are truncated; 0: never.

    Raises:
        TypeError: for specs of no fixed shape, and observations of a type that torch can't use.
        ValueError: for a primer that sets no number.
    """
    _refuse_types(description)
    count = max(2 * num_envs, min(_EXAMPLES, _EXAMPLE_BYTES // _row_bytes(description)))
    if isinstance(description, GymDescription):
        root = _gym_root(description, count, max_frames)
        first = _add_primed(root, policy)
        return MadeUp(root, first, set(first))
    check_fixed_shapes(description.specs)
    return MadeUp(_torchrl_root(description, count), {}, {*description.kept_keys})


def _refuse_types(description: GymDescription | TorchRLDescription) -> None:
    """Neither torch adds integers without a sign but uint8, nor does TensorDict copy them.

    Floats of more than 64 bits it doesn't have.
    """
    remedy = "with an ObservationWrapper of gymnasium, or a transform of TorchRL"
    if isinstance(description, GymDescription):
        fields = [field for field, _ in observation_fields(description.observation_space)]
        found = [(field.key, field.dtype) for field in fields]
    else:
        found = [
            (key, str(value.dtype).removeprefix("torch."))
            for key, value in leaves(description.transition.exclude("next"))
            if key not in description.action_keys
        ]
    for key, dtype in found:
        if dtype in ("float96", "float128"):
            raise TypeError(
                f"the environment gives {named(key)} as {dtype} (numpy.longdouble), which torch "
                f"doesn't have: make it float32, or float64, {remedy}"
            )
        if dtype in ("uint16", "uint32", "uint64"):
            raise TypeError(
                f"the environment gives {named(key)} as {dtype}, which TensorDict can't copy: "
                f"make it float32, or int{2 * int(dtype[4:]) if dtype != 'uint64' else 64}, "
                f"{remedy}"
            )


def _row_bytes(description: GymDescription | TorchRLDescription) -> int:
    """Size of one environment's observation."""
    if isinstance(description, GymDescription):
        fields = [field for field, _ in observation_fields(description.observation_space)]
        return sum(field.num_bytes for field in fields) + 1
    return sum(value.nbytes for _, value in leaves(description.transition.exclude("next"))) + 1


def _gym_root(description: GymDescription, count: int, max_frames: int) -> TensorDict:
    """Random values of all that an executor may write at the root, ``[count]``."""
    root = TensorDict({}, [count])
    space = description.observation_space
    try:
        space.seed(0)
        found = _by_key(space, [space.sample() for _ in range(count)])
    except Exception:  # of a class of the user's own, which may draw nothing
        found = _by_key(space, [_drawn(space) for _ in range(count)])
    for key, values in found.items():
        root[key] = _plausible(torch.from_numpy(values))
    for name in _DONE_NAMES:
        root[name] = torch.zeros(count, 1, dtype=torch.bool)
    if max_frames:
        root["step_count"] = torch.randint(max_frames, (count, 1))
    if "is_init" not in root.keys():
        root["is_init"] = torch.rand(count, 1) < 0.5
    return root


def _by_key(space: gym.Space[Any], samples: Sequence[Any]) -> dict[Key, Array]:
    """The arrays that samples of a space are made up of, ``[count, *shape]`` each.

    Raises if they are not of its shape and data type.
    """
    found = {}
    for field, path in observation_fields(space):
        values = []
        for sample in samples:
            for name in path:
                sample = sample[name]
            values.append(sample)
        array = np.array(values, np.dtype(field.dtype))
        found[field.key] = array.reshape(len(samples), *field.shape)
    return found


def _drawn(space: gym.Space[Any]) -> Any:
    """A sample as gymnasium draws it, whatever a class of the user's own makes of ``sample``."""
    if isinstance(space, gym.spaces.Dict):
        return {name: _drawn(child) for name, child in space.spaces.items()}
    kind: Any = next(kind for kind in ARRAY_SPACES if isinstance(space, kind))
    return kind.sample(space)


def _add_primed(root: TensorDict, policy: TensorDictModuleBase) -> dict[Key, float]:
    """Add random recurrent states, or what else the policy's primers set; returns first values."""
    keys = root.keys(True)
    missing = [as_path(key) for key in policy.in_keys if key not in keys]
    specs = primer_specs(policy) if missing else {}
    first = {}
    for key in missing:
        if key in specs:
            primer, spec = specs[key]
            root[key] = torch.randn(root.shape[0], *spec.shape).to(spec.dtype)
            first[key] = first_value(primer, key)
    return first


def _torchrl_root(description: TorchRLDescription, count: int) -> TensorDict:
    """Random values of all that the environment gives at the root, ``[count]``."""
    actions = set(description.action_keys)
    transition = description.transition.exclude("next")
    root = TensorDict({}, [count])
    for key, value in leaves(transition):
        if key not in actions:
            root[key] = value.expand(count, *value.shape).clone()
    observation = description.specs["output_spec", "full_observation_spec"]
    for index in range(count):
        for key, value in leaves(observation.rand()):
            root[key][index] = value
    for key, value in leaves(root):
        root[key] = _plausible(value)
    return root


def _plausible(values: Tensor) -> Tensor:
    """Standard normal instead of what an unbounded float space samples, which may be enormous."""
    return torch.randn(values.shape).to(values.dtype) if values.is_floating_point() else values


def trial_inputs(
    description: GymDescription | TorchRLDescription, made_up: TensorDictBase, max_frames: int
) -> TrialInputs:
    """Inputs to try a policy with: those that are made up, and what an environment gave.

    Args:
        description: with its observations.
        made_up: ``[count]``, of the policy's inputs.
        max_frames: length at which episodes are truncated; 0: never.
    """
    observed: Observations | None = description.observations
    if observed is None:
        return TrialInputs(None, 0, made_up.contiguous())
    lengths = torch.tensor(observed.lengths)[:, None]
    real = TensorDict({}, [len(lengths)])
    added = []
    for key, value in leaves(made_up):
        given = _observed(description, observed, key)
        if given is not None and (given.dtype, given.shape[1:]) == (value.dtype, value.shape[1:]):
            real[key] = given
            continue
        added.append(key)
        if key == ("is_init",):
            real[key] = lengths == 0
        elif key == ("step_count",) and max_frames:
            real[key] = lengths.clamp(max=max_frames - 1)
        else:  # as where an episode starts
            real[key] = torch.zeros_like(value[:1]).expand(len(lengths), *value.shape[1:])
    return TrialInputs(real.contiguous(), observed.num_resets, made_up.contiguous(), tuple(added))


def _observed(
    description: GymDescription | TorchRLDescription, observed: Observations, key: Key
) -> Tensor | None:
    """What was observed under a key, ``[m, *shape]``."""
    if isinstance(description, GymDescription):
        array = observed.values.get(key)
        return None if array is None else torch.from_numpy(array)
    found: Tensor | None = observed.values.get(key, None)
    return found
