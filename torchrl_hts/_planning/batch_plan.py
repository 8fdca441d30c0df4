"""What a batch looks like: from an environment's description and a trial run of the policy."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_hts._executor.gym_env import Carried, GymDescription, RowOptions, observation_fields
from torchrl_hts._executor.info import InfoKey, info_fields
from torchrl_hts._executor.primers import first_value, primer_specs
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._executor.trial_observations import Observations
from torchrl_hts._executor.values import check_keys
from torchrl_hts._executor.written_once import check_written_once, collector_keys
from torchrl_hts._planning.arguments import are_alike
from torchrl_hts._planning.pass_times import PassJob
from torchrl_hts._planning.policy_advice import on_action
from torchrl_hts._planning.policy_trial import try_policy
from torchrl_hts._policy.compiled import eagerly
from torchrl_hts._policy.trial_inputs import TrialInputs
from torchrl_hts._rounds.entries import check_fixed_shapes, is_private, leaves
from torchrl_hts._rounds.keys import Key, as_path, named
from torchrl_hts._rounds.shared_memory import Field
from torchrl_hts._rounds.slots import field_of

__all__ = ["BatchPlan", "Planner", "plan_batch"]

_EXAMPLES = 512  # rows; how many are needed is for the calibration to say
_EXAMPLE_BYTES = 1 << 25  # but no more than this, however large an observation is
_GYM_REMEDY = "Rename the environment's with a gymnasium.ObservationWrapper"
_TORCHRL_REMEDY = "Rename the environment's with a torchrl.envs.RenameTransform"
_DONE_NAMES = ("done", "terminated", "truncated")


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
    """

    fields: tuple[Field, ...]
    examples: TensorDictBase
    trial: TrialInputs
    outputs: tuple[Key, ...]
    options: RowOptions
    truncated_keys: tuple[Key, ...]


class Planner:
    """Lays out the batches of one collector.

    Args:
        policy: pickled, its tensors on the CPU.
        num_envs: N.
        on_cpu: whether the policy will run on the CPU.
        exploration_type, max_frames_per_traj, compact_obs, info_keys: see `plan_batch`.
    """

    def __init__(
        self,
        policy: bytes,
        num_envs: int,
        *,
        on_cpu: bool,
        exploration_type: ExplorationType,
        max_frames_per_traj: int,
        compact_obs: bool,
        info_keys: tuple[InfoKey, ...] = (),
    ) -> None:
        self._policy = policy
        self._num_envs = num_envs
        self._on_cpu = on_cpu
        self._exploration_type = exploration_type
        self._max_frames_per_traj = max_frames_per_traj
        self._compact_obs = compact_obs
        self._info_keys = info_keys
        self._last: tuple[GymDescription | TorchRLDescription, BatchPlan] | None = None

    def plan(self, description: GymDescription | TorchRLDescription) -> BatchPlan:
        """See `plan_batch`; what was planned last is kept for environments that are alike.

        But not if that was done without observations, and now there are some.
        """
        last = None if self._last is None else self._last[0]
        blind = last is not None and last.observations is None
        if not are_alike(description, last) or (blind and description.observations is not None):
            planned = plan_batch(
                description,
                pickle.loads(self._policy),
                self._num_envs,
                exploration_type=self._exploration_type,
                max_frames_per_traj=self._max_frames_per_traj,
                compact_obs=self._compact_obs,
                info_keys=self._info_keys,
            )
            if not self._on_cpu:  # where a row that is refused may cost the device its sanity
                planned = replace(planned, trial=planned.trial.accepted_by(self._run))
            self._last = description, planned
        assert self._last is not None
        return self._last[1]

    def _run(self, inputs: TensorDictBase) -> TensorDictBase:
        generator, kind = torch.random.fork_rng(devices=[]), self._exploration_type
        with generator, torch.no_grad(), set_exploration_type(kind), eagerly():
            written: TensorDictBase = pickle.loads(self._policy)(inputs.copy())
            return written

    def pass_job(self, description: GymDescription | TorchRLDescription) -> PassJob | None:
        """What it takes to time a pass of all environments; None if it can't be, or on no CPU."""
        if not self._on_cpu:
            return None
        try:
            examples = self.plan(description).examples[: self._num_envs].clone()
        except Exception:  # which is met again, and told, when all environments are known
            return None
        return PassJob(self._policy, pickle.dumps(examples), self._exploration_type)


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
            or writes one that doesn't fit the action space; if an info key is taken, or the
            environment is TorchRL's.
        TypeError: for spaces or entries that aren't arrays of a fixed shape.
    """
    count = max(2 * num_envs, min(_EXAMPLES, _EXAMPLE_BYTES // _row_bytes(description)))
    if isinstance(description, GymDescription):
        is_init = "is_init" in policy.in_keys
        _check_names(description, max_frames_per_traj, (), write_is_init=is_init)
    generator = torch.random.fork_rng(devices=[])
    with generator, torch.no_grad(), set_exploration_type(exploration_type), eagerly():
        torch.manual_seed(0)
        if isinstance(description, GymDescription):
            root = _gym_root(description, count, max_frames_per_traj)
            primed = _add_primed(root, policy)
            kept = set(primed)
        else:
            check_fixed_shapes(description.specs)
            root, primed, kept = _torchrl_root(description, count), {}, {*description.kept_keys}
        everything = _trial_inputs(description, root, max_frames_per_traj)
        space = getattr(description, "observation_space", None)
        trial = try_policy(everything, policy, num_envs, kept, space)
    outputs, inputs = trial.outputs, trial.reads.inputs
    fields: dict[Key, Field] = {}
    needed = {*inputs, *trial.reads.sources, *outputs}
    write_is_init = False

    def add(values: Iterable[tuple[Key, Tensor]], prefix: Key = ()) -> None:
        for key, value in values:
            if not is_private(prefix + key) or prefix + key in needed:
                fields[prefix + key] = field_of(prefix + key, value, 1)

    if isinstance(description, GymDescription):
        write_is_init = ("is_init",) in inputs
        _check_names(description, max_frames_per_traj, outputs, write_is_init=write_is_init)
        check_keys("action", description.action_space)
        _check_gym_action(description.action_space, ("action",), outputs)
        observed = [field.key for field, _ in observation_fields(description.observation_space)]
        if not write_is_init and ("is_init",) not in observed:
            root = root.exclude("is_init")
        add(leaves(root))
        after = root.exclude(*(key for key in primed if ("next", *key) not in outputs))
        after = after.exclude(*(observed if compact_obs else ()))
        after["reward"] = torch.zeros(*root.shape, 1)
        add(leaves(after), ("next",))
        truncated: tuple[Key, ...] = (("truncated",),)
    else:
        if info_keys:
            raise ValueError(
                "info_keys is for gymnasium environments: let a TorchRL environment read its info "
                "itself, with env.set_info_dict_reader(torchrl.envs.default_info_dict_reader("
                "[...])) in the factory"
            )
        check_written_once(_environment_keys(description), {}, outputs, remedy=_TORCHRL_REMEDY)
        _check_torchrl_action(description, outputs)
        add(leaves(root))
        successor = description.transition.get("next").expand(root.shape)
        add(leaves(successor.exclude(*(description.state_keys if compact_obs else ()))), ("next",))
        truncated = description.truncated_keys
    add(leaves(trial.examples))
    add(outputs.items())
    fields |= {field.key: field for field in info_fields(info_keys, list(fields))}
    fields["collector", "traj_ids"] = Field(("collector", "traj_ids"), (), "int64")
    carried = [Carried(key, source) for key, source in trial.reads.sources.items()]
    for key, start in primed.items():
        if key in inputs:
            moved = ("next", *key)
            carried.append(Carried(key, moved if moved in outputs else key, start))
    return BatchPlan(
        fields=tuple(fields.values()),
        examples=trial.examples.contiguous(),
        trial=trial.inputs,
        outputs=tuple(outputs),
        options=RowOptions(
            max_frames_per_traj=max_frames_per_traj,
            write_next_observation=not compact_obs,
            policy_keys=tuple(outputs),
            carried=tuple(carried),
            write_is_init=write_is_init,
            info_keys=info_keys,
        ),
        truncated_keys=tuple(("next", *key) for key in truncated),
    )


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
    space.seed(0)
    samples = [space.sample() for _ in range(count)]
    for field, path in observation_fields(space):
        values = []
        for sample in samples:
            for name in path:
                sample = sample[name]
            values.append(sample)
        root[field.key] = _plausible(torch.from_numpy(np.array(values, np.dtype(field.dtype))))
    for name in _DONE_NAMES:
        root[name] = torch.zeros(count, 1, dtype=torch.bool)
    if max_frames:
        root["step_count"] = torch.randint(max_frames, (count, 1))
    if "is_init" not in root.keys():
        root["is_init"] = torch.rand(count, 1) < 0.5
    return root


def _trial_inputs(
    description: GymDescription | TorchRLDescription, made_up: TensorDictBase, max_frames: int
) -> TrialInputs:
    """Inputs to try a policy with: those that are made up, and what an environment gave.

    Args:
        description: with its observations.
        made_up: ``[count]``, of the policy's inputs.
        max_frames: see `plan_batch`.
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


def _add_primed(root: TensorDict, policy: TensorDictModuleBase) -> dict[Key, float]:
    """Add random recurrent states, or what else the policy's primers set; returns first values."""
    keys = root.keys(True)
    missing = [as_path(key) for key in policy.in_keys if key not in keys]
    specs = primer_specs(policy) if missing else {}
    starts = {}
    for key in missing:
        if key in specs:
            primer, spec = specs[key]
            root[key] = torch.randn(root.shape[0], *spec.shape).to(spec.dtype)
            starts[key] = first_value(primer, key)
    return starts


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


def _check_gym_action(space: gym.Space[Any], key: Key, outputs: dict[Key, Tensor]) -> None:
    if isinstance(space, gym.spaces.Dict):
        for name, child in space.spaces.items():
            _check_gym_action(child, (*key, name), outputs)
        return
    sizes: tuple[int, ...]
    if isinstance(space, gym.spaces.Discrete):
        sizes = (1, int(space.n))
    elif isinstance(space, gym.spaces.MultiDiscrete):
        sizes = (int(space.nvec.size), int(space.nvec.sum()))
    elif isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
        sizes = (int(np.prod(space.shape)),)
    else:
        raise TypeError(
            f"the action space has a {type(space).__name__}; supported are Discrete, "
            "MultiDiscrete, MultiBinary, Box and Dicts of them. Turn it into one of these with "
            "gymnasium.wrappers.TransformAction"
        )
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


def _check_torchrl_action(description: TorchRLDescription, outputs: dict[Key, Tensor]) -> None:
    for key in description.action_keys:
        _expect_action(key, outputs)
        expected = description.transition.get(key).shape
        found = outputs[key].shape[1:]
        spec = description.specs[("input_spec", "full_action_spec", *key)]
        if found != expected:
            raise ValueError(
                f"the policy writes {named(key)} of shape {tuple(found)}; the environment's action "
                f"spec has {tuple(expected)}{on_action(spec, tuple(found))}"
            )


def _expect_action(key: Key, outputs: dict[Key, Tensor]) -> None:
    if key not in outputs:
        raise ValueError(
            f"the policy does not write the environment's action {named(key)}; it writes "
            f"{', '.join(map(named, outputs)) or 'nothing'}"
        )
