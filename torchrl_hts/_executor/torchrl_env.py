"""A TorchRL environment, with any transforms, whose transitions lie in its rows of the slots.

It may be a batch of k environments that step as one: an ``EnvBase`` with ``batch_size=[k]``. Then
it is one unit of the schedule, and the data are those of k single environments.

Axes: k environments of a batch, S slots, T steps of a round.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import ActionMask, EnvBase, StepCounter, TransformedEnv

from torchrl_hts._executor import space_texts
from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_env import RowOptions
from torchrl_hts._executor.primers import primed_keys
from torchrl_hts._executor.spaces import own_spaces, seed_spaces
from torchrl_hts._executor.torchrl_layers import (
    check_autoreset,
    gymnasium_within,
    name_of,
    singles_within,
)
from torchrl_hts._executor.torchrl_play import torchrl_observations
from torchrl_hts._executor.torchrl_state.state import TorchRLState
from torchrl_hts._executor.torchrl_values import guard_conversions, guard_memory
from torchrl_hts._executor.trial_observations import Observations
from torchrl_hts._rounds.entries import check_alike, check_specified, leaves
from torchrl_hts._rounds.keys import Key, as_path, named
from torchrl_hts._rounds.shared_memory import Array, SharedMemory
from torchrl_hts._rounds.slots import tensor_over
from torchrl_hts.errors import EnvError, InvalidValueError

__all__ = ["TorchRLDescription", "TorchRLEnvironment", "copy_value"]


@dataclass(frozen=True)
class TorchRLDescription:
    """What the main process needs to know of an environment; equal for all of a collector.

    Attributes:
        specs: every spec of one environment, transforms included.
        transition: ``env.fake_tensordict()`` of one environment, on the CPU.
        action_keys: keys of the actions.
        kept_keys: keys whose value an environment keeps from step to step as the policy leaves it:
            of its primers, and of its state.
        state_keys: observation and state keys, which ``compact_obs`` drops from ``"next"``.
        truncated_keys: keys of the truncation flags.
        observations: `trial_observations.Observations` of one of them; None where nobody looked.
        num_envs: how many environments it has, if it is a batch of them.
        is_batch: whether it is one, of a single environment perhaps.
        masks_actions: whether a transform restricts the actions from step to step, or the
            environment draws random ones in a way of its own.
        texts: what its specs are (`space_texts`), and the spaces of gymnasium's within.
    """

    specs: Composite
    transition: TensorDictBase
    action_keys: tuple[Key, ...]
    kept_keys: tuple[Key, ...]
    state_keys: tuple[Key, ...]
    truncated_keys: tuple[Key, ...]
    observations: Any = None
    num_envs: int = 1
    is_batch: bool = False
    masks_actions: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)


class TorchRLEnvironment:
    """An environment and its row ``[S][T, *shape]`` of every field; ``[S][T, k, *shape]`` of k.

    Args:
        env: an environment with an empty batch size, or a batch of them with ``batch_size=[k]``.
        index: of its unit of the schedule, among this learner's.
        generators: that it draws from besides its own ones, entered already; by default new ones.
        max_frames_per_traj: length at which a ``StepCounter`` truncates an episode; 0: never.
        device: where the environment computes; None leaves it where it is.

    Raises:
        EnvError: if a batch has several dimensions or is empty, or resets by itself; or if the
            environment counts steps already.
        TypeError: if the environments of a batch differ in what they give.
    """

    def __init__(
        self,
        env: EnvBase,
        index: int,
        generators: Generators | None = None,
        *,
        max_frames_per_traj: int = 0,
        device: str | None = None,
    ) -> None:
        if len(env.batch_size) > 1 or 0 in env.batch_size:
            raise EnvError(
                f"create_env_fn made an environment of batch size {tuple(env.batch_size)}; "
                "expected a single environment, of batch size (), or a batch of k, of batch size "
                "(k,): give several batches as entries of their own"
            )
        if max_frames_per_traj:
            if any("step_count" in as_path(key) for key in env.output_spec.keys(True, True)):
                raise EnvError(
                    "the environment has a 'step_count' already: set max_frames_per_traj=0, or "
                    "remove its StepCounter"
                )
            counter = StepCounter(max_steps=max_frames_per_traj)
            env = TransformedEnv(env, counter, auto_unwrap=True)
        if device is not None:
            env = env.to(device)
        self.env, self.index = env, index
        self._generators = generators or Generators(index)
        self._batch_size, self._has_warned = env.batch_size, False
        # Those that can be seeded one by one.
        self._singles = list(singles_within(env))
        self._gymnasium = [gymnasium_within(single) for single in self._singles]
        for single, gymnasium in zip(self._singles, self._gymnasium, strict=True):
            check_autoreset(single)
            guard_conversions(single)
            if gymnasium is not None:
                own_spaces(gymnasium)
        guard_memory(env)
        self._saved = TorchRLState(env, [one for one in self._gymnasium if one is not None])
        self._done_keys = [as_path(key) for key in env.done_keys]
        # A flag at the root is what an environment is begun anew by, whatever its agents say.
        self._end_keys = [key for key in self._done_keys if len(key) == 1] or self._done_keys
        state = (*env.full_observation_spec.keys(True, True), *env.full_state_spec.keys(True, True))
        specs, transition = env.specs.cpu(), env.fake_tensordict().cpu()
        if env.batch_size:
            check_alike(transition)
            for _ in leaves(transition):  # which raises for what no batch of ours can hold
                pass
            specs, transition = specs[0], transition[0]
        self.description = TorchRLDescription(
            specs,
            transition,
            tuple(as_path(key) for key in env.action_keys),
            tuple(sorted({*primed_keys(env), *map(as_path, env.full_state_spec.keys(True, True))})),
            tuple(as_path(key) for key in state),
            tuple(key for key in self._done_keys if key[-1] == "truncated"),
            num_envs=self._batch_size.numel(),
            is_batch=bool(self._batch_size),
            masks_actions=_masks_actions(env),
            texts=_texts(specs, self._gymnasium[0]),
        )

    def bind(self, memory: SharedMemory, options: RowOptions) -> None:
        """Find the rows of this environment, or these; call once the layout is known."""
        layout = memory.layout
        self._all_envs = layout.all_envs
        self.rows = layout.rows(self.index)
        first = self.rows[0]
        own = slice(first, self.rows.stop)
        numbers = layout.first_env + torch.arange(first, self.rows.stop)
        self._numbers = numbers.view(self._batch_size)
        dtypes = {field.key: field.dtype for field in layout.fields}

        def over(array: Array, key: Key) -> Tensor:  # [T, *shape], or [T, k, *shape]
            rows = tensor_over(array[own], dtypes[key])
            return rows.transpose(0, 1) if self._batch_size else rows[0]

        rows = [
            {key: over(array, key) for key, array in memory.fields(slot).items()}
            for slot in range(layout.num_slots)
        ]
        ours = {key for key, _ in leaves(self.description.transition)}
        self._known = {*ours, *options.policy_keys}
        ours -= set(self.description.action_keys)
        ours |= {carried.key for carried in options.carried}
        self._carried = [
            (
                carried,
                [row[carried.source] for row in rows],
                torch.full_like(rows[0][carried.key][0], carried.start),
            )
            for carried in options.carried
        ]
        self._from_policy = [(key, [row[key] for row in rows]) for key in options.policy_keys]
        self._root, self._next = (
            [
                (key, [row[key] for row in rows])
                for key in dtypes
                if key in ours and (key[0] == "next") == successor
            ]
            for successor in (False, True)
        )
        self._trajectory = [row["collector", "traj_ids"] for row in rows]

    def reset(self, seeds: int | Sequence[int], steps: int) -> None:
        """Start over with new episodes, after so many steps of each environment in all.

        Args:
            seeds: of each environment.
            steps: see `GymEnvironment.reset`.
        """
        seeds = [seeds] if isinstance(seeds, int) else seeds
        self._episode = torch.full(self._batch_size, steps)
        self._current = self.begin(seeds)
        check_specified(self._current, self._known)
        self._has_stepped = False
        for carried, _, value in self._carried:
            self._current.set(carried.key, value.clone())

    def begin(self, seeds: Sequence[int]) -> TensorDictBase:
        """Begin new episodes, by a seed of each environment; returns what there is to see."""
        self._generators.seed(*seeds)
        self._generators.enter()
        torch.manual_seed(seeds[0])  # on all devices
        self._seed(seeds)
        return self.env.reset()

    def advance(self, current: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step with the actions in what there is to see; returns the step, and what comes next."""
        # TorchRL environments and transforms (``NoopResetEnv``, say) draw from torch's generator.
        self._generators.enter_step()
        done_step, following = self.env.step_and_maybe_reset(current)
        self._saved.look()
        return done_step, following

    def _seed(self, seeds: Sequence[int]) -> None:
        """Seed each environment, or all by the first seed where they can't be told apart."""
        if len(self._singles) < len(seeds) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{name_of(self.env)} takes one seed for all of its environments: it is given that "
                "of the first, and what they do depends on how many share it",
                stacklevel=2,
            )
        for single, gymnasium, seed in zip(self._singles, self._gymnasium, seeds, strict=False):
            if gymnasium is not None:
                seed_spaces(gymnasium, seed)
            single.set_seed(seed)

    @property
    def episodes(self) -> Tensor:
        """For each environment a number that rises by 1 where an episode ends."""
        return self._episode

    def observations(self) -> Observations:
        """What resets with seeds of their own give."""
        return torchrl_observations(self.env)

    def save(self) -> bytes:
        """All that the coming steps depend on, and that is not in the slots.

        Raises:
            CannotSaveError: if the environment holds something that can't be saved.
        """
        return self.save_with(self._current, self._episode)

    def save_with(self, current: TensorDictBase, episode: Tensor) -> bytes:
        """The same, of an environment that somebody else steps: see `begin` and `advance`.

        Args:
            current: what there is to see.
            episode: see `episodes`.
        """
        self._generators.enter()
        return self._saved.save((current, episode, self._generators.state()))

    def restore(self, state: bytes) -> None:
        """Go on where `save` was called, in another process and another environment maybe."""
        self._current, self._episode = self.restore_from(state)
        self._has_stepped = True

    def restore_from(self, state: bytes) -> tuple[TensorDictBase, Tensor]:
        """The same; returns what was given to `save_with`."""
        current = self.begin(range(self._batch_size.numel()))
        try:
            current, episode, generators = self._saved.restore(state)
        except ValueError:  # it may have parts that it makes at its first step
            self.advance(self.env.rand_action(current))
            current, episode, generators = self._saved.restore(state)
        self._generators.restore(generators)
        return current, episode

    def write_observation(self, slot: int, t: int) -> None:
        """Write what the policy reads at step ``t``."""
        for key, rows in self._root:
            copy_value(key, self._current.get(key), rows[slot][t])

    def step(self, slot: int, t: int) -> int:
        """Step with the actions at ``t`` and write the transitions; returns how many ended."""
        current = self._current
        for key, rows in self._from_policy:
            current.set(key, rows[slot][t].clone())
        done_step, self._current = self.advance(current)
        if not self._has_stepped:  # what a first step gives shows what all give
            check_specified(done_step.get("next"), self._known, ("next",))
            self._has_stepped = True
        for key, rows in self._next:
            copy_value(key, done_step.get(key), rows[slot][t])
        self._trajectory[slot][t] = self._numbers + self._all_envs * self._episode
        ended = self._ended(done_step.get("next"))
        self._episode += ended
        for carried, left, start in self._carried:
            mine = ended.view([*ended.shape, *[1] * (start.ndim - ended.ndim)])
            self._current.set(carried.key, torch.where(mine, start, left[slot][t]))
        return int(ended.sum())

    def _ended(self, successor: TensorDictBase) -> Tensor:
        """Which of them are at the end of an episode, of the batch's size."""
        ended = torch.zeros(self._batch_size, dtype=torch.bool)
        for key in self._end_keys:
            flags: Tensor = successor.get(key)
            ended |= flags.reshape(*self._batch_size, -1).any(-1).cpu()
        return ended

    def close(self) -> None:
        """Close the environment."""
        self.env.close(raise_if_closed=False)


def _texts(specs: Composite, within: gym.Env[Any, Any] | None) -> dict[str, str]:
    """What its specs are, and the spaces of gymnasium's environment that it is around, if any."""
    found = space_texts.of_specs(specs)
    return found if within is None else found | space_texts.of_env(within)


def _masks_actions(env: EnvBase) -> bool:
    """Whether it has an ``ActionMask``, whose mask comes into the spec with each reset and step.

    Or draws random actions in a way of its own: those of its spec would be others.
    """
    while isinstance(env, TransformedEnv):
        if any(isinstance(part, ActionMask) for part in env.transform.modules()):
            return True
        env = env.base_env
    return type(env).rand_action is not EnvBase.rand_action


def copy_value(key: Key, value: Tensor, row: Tensor) -> None:
    """Write a value into its row; raises if it isn't what the specs say, or NaN."""
    name = named(key)
    if value.shape != row.shape or value.dtype != row.dtype:
        raise InvalidValueError(
            f"the environment returned {name} of shape {tuple(value.shape)} and data type "
            f"{value.dtype}; its specs say {tuple(row.shape)} and {row.dtype}"
        )
    row.copy_(value)
    if row.is_floating_point() and row.isnan().any():
        raise InvalidValueError(
            f"the environment returned NaN in {name}. If NaN is meant to say something, replace "
            "it with a transform"
        )
