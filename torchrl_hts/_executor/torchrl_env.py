"""A TorchRL environment, with any transforms, whose transitions lie in its row of the slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_env import RowOptions
from torchrl_hts._executor.primers import primed_keys
from torchrl_hts._executor.spaces import own_spaces, seed_spaces
from torchrl_hts._executor.torchrl_values import guard_conversions
from torchrl_hts._executor.trial_observations import MOST_PLAYED, Observations, at_resets, kept
from torchrl_hts._rounds.entries import check_specified, leaves
from torchrl_hts._rounds.keys import Key, as_path, named
from torchrl_hts._rounds.shared_memory import SharedMemory
from torchrl_hts._rounds.slots import tensor_over
from torchrl_hts.errors import CannotSaveError, InvalidValueError

__all__ = ["TorchRLDescription", "TorchRLEnvironment", "TorchRLPlay"]


@dataclass(frozen=True)
class TorchRLDescription:
    """What the main process needs to know of an environment; equal for all of a collector.

    Attributes:
        specs: every spec, transforms included.
        transition: ``env.fake_tensordict()``, on the CPU.
        action_keys: keys of the actions.
        kept_keys: keys whose value an environment keeps from step to step as the policy leaves it:
            of its primers, and of its state.
        state_keys: observation and state keys, which ``compact_obs`` drops from ``"next"``.
        truncated_keys: keys of the truncation flags.
        observations: `trial_observations.Observations` of one of them; None where nobody looked.
        num_envs: how many environments it has: one.
    """

    specs: Composite
    transition: TensorDictBase
    action_keys: tuple[Key, ...]
    kept_keys: tuple[Key, ...]
    state_keys: tuple[Key, ...]
    truncated_keys: tuple[Key, ...]
    observations: Any = None
    num_envs: int = 1


class TorchRLEnvironment:
    """One environment and its row ``[S][T, *shape]`` of every field.

    Args:
        env: an environment with an empty batch size.
        index: of its unit of the schedule, among this learner's.
        generators: that it draws from besides its own ones, entered already; by default new ones.
        max_frames_per_traj: length at which a ``StepCounter`` truncates an episode; 0: never.
        device: where the environment computes; None leaves it where it is.

    Raises:
        ValueError: if the environment is a batch, or counts steps already.
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
        if env.batch_size:
            raise ValueError(
                f"create_env_fn[{index}] made an environment of batch size "
                f"{tuple(env.batch_size)}; give one factory per single environment: the collector "
                "does what SerialEnv and ParallelEnv would"
            )
        if max_frames_per_traj:
            if any("step_count" in as_path(key) for key in env.output_spec.keys(True, True)):
                raise ValueError(
                    "the environment has a 'step_count' already: set max_frames_per_traj=0, or "
                    "remove its StepCounter"
                )
            env = TransformedEnv(env, StepCounter(max_steps=max_frames_per_traj))
        if device is not None:
            env = env.to(device)
        guard_conversions(env)
        self.env = env
        self.index = index
        self._generators = generators or Generators(index)
        self._gymnasium = _gymnasium_within(env)
        if self._gymnasium is not None:
            own_spaces(self._gymnasium)
        self._done_keys = [as_path(key) for key in env.done_keys]
        state = (*env.full_observation_spec.keys(True, True), *env.full_state_spec.keys(True, True))
        self.description = TorchRLDescription(
            env.specs.cpu(),
            env.fake_tensordict().cpu(),
            tuple(as_path(key) for key in env.action_keys),
            tuple(sorted({*primed_keys(env), *map(as_path, env.full_state_spec.keys(True, True))})),
            tuple(as_path(key) for key in state),
            tuple(key for key in self._done_keys if key[-1] == "truncated"),
        )

    def bind(self, memory: SharedMemory, options: RowOptions) -> None:
        """Find this environment's rows; call once the layout is known."""
        layout = memory.layout
        self._all_envs = layout.all_envs or layout.num_envs
        self.rows = layout.rows(self.index)
        (own,) = self.rows
        self._number = layout.first_env + own
        dtypes = {field.key: field.dtype for field in layout.fields}
        rows = [
            {
                key: tensor_over(array[own], dtypes[key])
                for key, array in memory.fields(slot).items()
            }
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

    def reset(self, seed: int, steps: int) -> None:
        """Start over with a new episode, after so many steps of this environment in all."""
        self._episode = steps
        self._generators.seed(seed)
        self._generators.enter()
        if self._gymnasium is not None:
            seed_spaces(self._gymnasium, seed)
        torch.manual_seed(seed)  # on all devices
        self.env.set_seed(seed)
        self._current = self.env.reset()
        check_specified(self._current, self._known)
        self._has_stepped = False
        for carried, _, value in self._carried:
            self._current.set(carried.key, value.clone())

    def observations(self) -> Observations:
        """What resets with seeds of their own give."""
        return _observations(self.env)

    def save(self) -> bytes:
        """Raises CannotSaveError: what a TorchRL environment holds can't be known from outside."""
        raise CannotSaveError(
            "a TorchRL environment has no way to save its state; give create_env_fn a "
            "gymnasium.Env if runs are to be resumed in the middle of their episodes"
        )

    def restore(self, state: bytes) -> None:
        """Raises CannotSaveError: there is no such state."""
        raise CannotSaveError("the state is of a gymnasium.Env, and this is a TorchRL environment")

    def write_observation(self, slot: int, t: int) -> None:
        """Write what the policy reads at step ``t``."""
        for key, rows in self._root:
            _copy(key, self._current.get(key), rows[slot][t])

    def step(self, slot: int, t: int) -> bool:
        """Step with the action at ``t`` and write the transition; returns if the episode ended."""
        current = self._current
        for key, rows in self._from_policy:
            current.set(key, rows[slot][t].clone())
        # TorchRL environments and transforms (``NoopResetEnv``, say) draw from torch's generator.
        self._generators.enter_step()
        done_step, self._current = self.env.step_and_maybe_reset(current)
        if not self._has_stepped:  # what a first step gives shows what all give
            check_specified(done_step.get("next"), self._known, ("next",))
            self._has_stepped = True
        for key, rows in self._next:
            _copy(key, done_step.get(key), rows[slot][t])
        self._trajectory[slot][t] = self._number + self._all_envs * self._episode
        successor = done_step.get("next")
        done = any(bool(successor.get(key).any()) for key in self._done_keys)
        self._episode += done
        for carried, left, start in self._carried:
            self._current.set(carried.key, (start if done else left[slot][t]).clone())
        return done

    def close(self) -> None:
        """Close the environment."""
        self.env.close(raise_if_closed=False)


class TorchRLPlay:
    """An environment and what it takes to play it at random; see `probe.RandomPlay`."""

    def __init__(self, env: EnvBase) -> None:
        self.env = env
        self.played: list[tuple[int, TensorDictBase]] = []  # see `GymPlay`
        self._length = 0
        self._done_keys = env.done_keys

    def reset(self) -> None:
        """Begin an episode."""
        first = not self.played
        self._current = _reset(self.env, 0) if first else self.env.reset()
        self._length = 0
        if first:
            self._note()

    def choose(self) -> None:
        """Draw the next action."""
        if self._length and len(self.played) < MOST_PLAYED:
            self._note()
        self.env.rand_action(self._current)

    def _note(self) -> None:
        self.played.append((self._length, self._current.clone()))

    def observations(self) -> Observations:
        """What there was to see, after resets with further seeds."""
        return _observations(self.env, self.played)

    def step(self) -> bool:
        """Make a step; returns whether the episode has ended."""
        successor = self.env.step(self._current).get("next")
        self._current = self.env.step_mdp(self._current)
        self._length += 1
        return any(bool(successor.get(key).any()) for key in self._done_keys)


def _reset(env: EnvBase, seed: int) -> TensorDictBase:
    torch.manual_seed(seed)
    env.set_seed(seed)
    return env.reset()


def _observations(env: EnvBase, played: Sequence[tuple[int, TensorDictBase]] = ()) -> Observations:
    """What an environment gives at its root at resets, and what random play met with.

    Args:
        env: the environment.
        played: steps since the reset, and what there was; a reset among them is that of seed 0.
    """
    known = [td for length, td in played if not length]
    resets = at_resets(lambda seed: _reset(env, seed).clone(), known)
    moments = [*((0, td) for td in resets), *(each for each in played if each[0])]
    tensors = [dict(_stackable(td)) for _, td in moments]
    # Not the action, which the last step leaves there.
    keys = [key for key in tensors[0] if all(key in each for each in tensors)]
    moments = moments[: kept(sum(tensors[0][key].nbytes for key in keys))]
    values = torch.stack([td.select(*keys).cpu() for _, td in moments]).contiguous()
    lengths = tuple(length for length, _ in moments)
    return Observations(values, lengths, min(len(resets), len(moments)))


def _stackable(td: TensorDictBase) -> Iterable[tuple[Any, Tensor]]:
    for key, value in td.items(include_nested=True, leaves_only=True):
        if isinstance(value, Tensor) and not value.is_nested:
            yield key, value


def _gymnasium_within(env: EnvBase) -> gym.Env[Any, Any] | None:
    """The gymnasium environment that ``GymWrapper`` and its transforms are around, if any."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    within = getattr(env, "_env", None)
    return within if isinstance(within, gym.Env) else None


def _copy(key: Key, value: Tensor, row: Tensor) -> None:
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
