"""What a batch looks like: from an environment's description and a trial run of the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_hts._executor.gym_env import Carried, GymDescription, RowOptions
from torchrl_hts._executor.info import InfoKey, info_fields
from torchrl_hts._executor.observations import observation_fields
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._executor.values import check_keys
from torchrl_hts._executor.written_once import check_written_once, collector_keys
from torchrl_hts._planning.action_checks import check_gym_action, check_torchrl_action
from torchrl_hts._planning.policy_parts import refused_strangers
from torchrl_hts._planning.policy_trial import PolicyTrial, try_policy
from torchrl_hts._planning.trial_rows import MadeUp, make_up, trial_inputs
from torchrl_hts._policy.compiled import eagerly
from torchrl_hts._policy.trial_inputs import TrialInputs
from torchrl_hts._rounds.entries import is_private, leaves
from torchrl_hts._rounds.keys import Key, as_path
from torchrl_hts._rounds.shared_memory import Field
from torchrl_hts._rounds.slots import field_of

__all__ = ["BatchPlan", "plan_batch"]

_GYM_REMEDY = "Rename the environment's with a gymnasium.ObservationWrapper"
_TORCHRL_REMEDY = "Rename the environment's with a torchrl.envs.RenameTransform"


@dataclass(frozen=True)
class BatchPlan:
    """The layout of a batch, and who writes what.

    Attributes:
        fields: every array of a slot.
        examples: TensorDict ``[count]`` of policy inputs that an environment gave.
        trial: these, and others to calibrate with.
        outputs: keys that the policy writes.
        options: how executors write their rows.
        truncated_keys: ``("next", ...)`` keys of the truncation flags.
        groups: see `Layout.groups`.
    """

    fields: tuple[Field, ...]
    examples: TensorDictBase
    trial: TrialInputs
    outputs: tuple[Key, ...]
    options: RowOptions
    truncated_keys: tuple[Key, ...]
    groups: tuple[tuple[Key, tuple[int, ...]], ...] = ()


def plan_batch(
    description: GymDescription | TorchRLDescription,
    policy: TensorDictModuleBase,
    num_envs: int,
    *,
    exploration_type: ExplorationType,
    max_frames_per_traj: int,
    compact_obs: bool,
    info_keys: tuple[InfoKey, ...] = (),
) -> BatchPlan:
    """Lay a batch out.

    Args:
        description: of one environment; the others are equal.
        policy: a copy of the policy on the CPU, which is run once on what the environment gave.
        num_envs: N.
        exploration_type: under which the policy runs.
        max_frames_per_traj: length at which episodes are truncated; 0: never.
        compact_obs: leave ``("next", observation)`` out.
        info_keys: of the numbers in a step's info that are written too; see `info_fields`.

    Raises:
        PolicyError: if the policy fails when it is run.
        ValueError: if the policy reads what the environment doesn't give, doesn't write the action,
            or writes one that doesn't fit the action space. Also if an info key is taken, or is of
            a TorchRL environment.
        TypeError: for spaces or entries that aren't arrays of a fixed shape, and if the policy uses
            a network that it has not registered.
    """
    is_init = False
    if isinstance(description, GymDescription):
        is_init = "is_init" in policy.in_keys
        _check_names(description, max_frames_per_traj, (), write_is_init=is_init)
    generator = torch.random.fork_rng(devices=[])
    with generator, torch.no_grad(), set_exploration_type(exploration_type), eagerly():
        torch.manual_seed(0)
        made_up = make_up(description, policy, num_envs, max_frames_per_traj)
        everything = trial_inputs(description, made_up.root, max_frames_per_traj)
        space = getattr(description, "observation_space", None)
        with refused_strangers(policy):
            trial = try_policy(everything, policy, num_envs, made_up.kept, space)
    if isinstance(description, GymDescription):
        own = _gym_rows(description, made_up, trial, max_frames_per_traj, compact_obs=compact_obs)
    elif info_keys:
        raise ValueError(
            "info_keys is for gymnasium environments: let a TorchRL environment read its info "
            "itself, with env.set_info_dict_reader(torchrl.envs.default_info_dict_reader("
            "[...])) in the factory"
        )
    else:
        own = _torchrl_rows(description, made_up.root, trial.outputs, compact_obs=compact_obs)
    fields = _fields(own, trial)
    fields |= {field.key: field for field in info_fields(info_keys, list(fields))}
    fields["collector", "traj_ids"] = Field(("collector", "traj_ids"), (), "int64")
    return BatchPlan(
        fields=tuple(fields.values()),
        examples=trial.examples.contiguous(),
        trial=trial.inputs,
        outputs=tuple(trial.outputs),
        options=RowOptions(
            max_frames_per_traj=max_frames_per_traj,
            write_next_observation=not compact_obs,
            policy_keys=tuple(trial.outputs),
            carried=_carried(made_up, trial),
            write_is_init=own.write_is_init,
            info_keys=info_keys,
        ),
        truncated_keys=tuple(("next", *key) for key in own.truncated_keys),
        groups=own.groups,
    )


@dataclass(frozen=True)
class _Rows:
    """What the environment and the collector write in a row.

    Attributes:
        root: values at the root, ``[count]``.
        after: those below ``"next"``.
        truncated_keys: of the truncation flags among them.
        write_is_init: whether ``"is_init"`` is for the collector to write.
        groups: see `Layout.groups`.
    """

    root: TensorDictBase
    after: TensorDictBase
    truncated_keys: tuple[Key, ...]
    write_is_init: bool = False
    groups: tuple[tuple[Key, tuple[int, ...]], ...] = ()


def _gym_rows(
    description: GymDescription,
    made_up: MadeUp,
    trial: PolicyTrial,
    max_frames: int,
    *,
    compact_obs: bool,
) -> _Rows:
    """The rows of a gymnasium environment, once names and actions have been checked."""
    write_is_init = ("is_init",) in trial.reads.inputs
    _check_names(description, max_frames, trial.outputs, write_is_init=write_is_init)
    check_keys("action", description.action_space)
    check_gym_action(description.action_space, ("action",), trial.outputs)
    observed = [field.key for field, _ in observation_fields(description.observation_space)]
    root = made_up.root
    if not write_is_init and ("is_init",) not in observed:
        root = root.exclude("is_init")
    after = root.exclude(*(key for key in made_up.first if ("next", *key) not in trial.outputs))
    after = after.exclude(*(observed if compact_obs else ()))
    after["reward"] = torch.zeros(*root.shape, 1, dtype=torch.float32)
    return _Rows(root, after, (("truncated",),), write_is_init)


def _torchrl_rows(
    description: TorchRLDescription,
    root: TensorDictBase,
    outputs: Mapping[Key, Tensor],
    *,
    compact_obs: bool,
) -> _Rows:
    """The rows of a TorchRL environment, once names and actions have been checked."""
    check_written_once(_environment_keys(description), {}, outputs, remedy=_TORCHRL_REMEDY)
    check_torchrl_action(description, outputs)
    after = description.transition.get("next").expand(root.shape)
    after = after.exclude(*(description.state_keys if compact_obs else ()))
    groups = tuple(
        (as_path(key), tuple(value.batch_size))
        for key, value in description.transition.items(include_nested=True)
        if is_tensor_collection(value) and not is_non_tensor(value) and value.batch_size
    )
    return _Rows(root, after, description.truncated_keys, groups=groups)


def _fields(own: _Rows, trial: PolicyTrial) -> dict[Key, Field]:
    """What a batch holds: of private entries those that somebody reads."""
    needed = {*trial.reads.inputs, *trial.reads.sources, *trial.outputs}
    values = chain(
        leaves(own.root),
        ((("next", *key), value) for key, value in leaves(own.after)),
        leaves(trial.examples),
        trial.outputs.items(),
    )
    return {
        key: field_of(key, value, 1)
        for key, value in values
        if not is_private(key) or key in needed
    }


def _carried(made_up: MadeUp, trial: PolicyTrial) -> tuple[Carried, ...]:
    """What the policy reads back of the step before, and the environment does not keep."""
    carried = [Carried(key, source) for key, source in trial.reads.sources.items()]
    for key, start in made_up.first.items():
        if key in trial.reads.inputs:
            after = ("next", *key)
            carried.append(Carried(key, after if after in trial.outputs else key, start))
    return tuple(carried)


def _check_names(
    description: GymDescription,
    max_frames_per_traj: int,
    outputs: Iterable[Key],
    *,
    write_is_init: bool,
) -> None:
    """Raise if a name is written by two of environment, collector and policy."""
    check_written_once(
        _environment_keys(description),
        collector_keys(max_frames_per_traj=max_frames_per_traj, write_is_init=write_is_init),
        outputs,
        remedy=_GYM_REMEDY,
    )


def _environment_keys(description: GymDescription | TorchRLDescription) -> list[Key]:
    """What the environment writes, but for what it keeps as the policy leaves it."""
    if isinstance(description, GymDescription):
        keys = [field.key for field, _ in observation_fields(description.observation_space)]
        return [*keys, *(("next", *key) for key in keys)]
    kept = {*description.action_keys, *description.kept_keys}
    keys = [key for key, _ in leaves(description.transition)]
    return [key for key in keys if (key[1:] if key[0] == "next" else key) not in kept]
