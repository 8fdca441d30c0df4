"""The environments of evaluations: of each the first episode counts, whatever it plays after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector.utils import batch_space, iterate
from torch import Tensor

from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_env import GymEnvironment, RowOptions
from torchrl_hts._executor.old_gym import checked_reset
from torchrl_hts._executor.torchrl_env import TorchRLEnvironment
from torchrl_hts._executor.values import checked_reward
from torchrl_hts._executor.vector_env import VectorEnvironment
from torchrl_hts._rounds.keys import Key, as_path
from torchrl_hts._rounds.shared_memory import SharedMemory
from torchrl_hts._rounds.slots import tensor_over

__all__ = ["GymScene", "Scene", "TorchRLScene", "VectorScene"]


class _FirstEpisodes:
    """Rows of a batch, in each of which the first episode counts.

    Attributes:
        rows: of a batch ``[episodes, 1]``, once they are bound.
        rewards: of the first episode of each row.
    """

    _env: Any
    rows: range
    rewards: list[list[float]]

    def bind(
        self, memory: SharedMemory, options: RowOptions, written: Mapping[Key, Tensor]
    ) -> None:
        """Find the rows; ``written`` is what a policy writes, ``[episodes, *shape]``."""
        self._env.bind(memory, options)
        self.rows = self._env.rows

    def write_observation(self) -> None:
        """Write what the policy reads."""
        self._env.write_observation(0, 0)

    @property
    def returns(self) -> list[float]:
        """Of the first episode of each row."""
        return [math.fsum(rewards) for rewards in self.rewards]

    @property
    def lengths(self) -> list[int]:
        """Of the first episode of each row."""
        return [len(rewards) for rewards in self.rewards]


class GymScene(_FirstEpisodes):
    """A gymnasium environment.

    Args:
        env: the environment.
        index: of the scene.
        generators: that it draws from, entered already.
        keep_actions: whether the actions are kept for a replay.
    """

    def __init__(
        self, env: gym.Env[Any, Any], index: int, generators: Generators, *, keep_actions: bool
    ) -> None:
        self._episode = _Episode(env, keep_actions=keep_actions)
        self._env: GymEnvironment = GymEnvironment(self._episode, index, generators)

    def begin(self, seeds: Sequence[int], count: int) -> None:
        """Begin an episode, the one that counts."""
        (seed,) = seeds
        self._env.reset(seed, 0)
        self.rewards = [self._episode.rewards]

    def step(self) -> bool:
        """Step with what the policy wrote; returns whether the episode has ended."""
        return self._env.step(0, 0)

    def actions(self, row: int) -> list[Any]:
        """Of the episode, in the format of the environment."""
        return self._episode.actions


class VectorScene(_FirstEpisodes):
    """A batch of gymnasium environments.

    Args:
        env: the batch.
        keep_actions: whether the actions are kept for a replay.
    """

    def __init__(self, env: VectorEnvironment, *, keep_actions: bool) -> None:
        self._env = env
        self._keep_actions = keep_actions

    def begin(self, seeds: Sequence[int], count: int) -> None:
        """Begin an episode in each environment; those of so many count."""
        self._env.reset(seeds, 0)
        self.rewards = [[] for _ in self.rows]
        self._actions: list[Any] = []
        self._going = np.arange(len(self.rows)) < count

    def step(self) -> bool:
        """Step with what the policy wrote; returns whether all that count have ended."""
        before = self._env.episodes.copy()
        self._env.step(0, 0)
        if self._keep_actions:
            self._actions.append(deepcopy(self._env.action))
        for at in np.flatnonzero(self._going).tolist():
            self.rewards[at].append(float(self._env.rewards[at]))
        self._going &= self._env.episodes == before
        return not self._going.any()

    def actions(self, row: int) -> list[Any]:
        """Of a row, in the format of one environment."""
        space = batch_space(self._env.description.action_space, len(self.rows))
        return [list(iterate(space, actions))[row] for actions in self._actions]


class TorchRLScene(_FirstEpisodes):
    """A TorchRL environment, or a batch of them, with any transforms and agents.

    The reward of a step is the mean over all that agents get.

    Args:
        env: the environment.
        keep_actions: whether the actions are kept for a replay.

    Attributes:
        index: of the scene.
        seeds: of the episodes.
    """

    def __init__(self, env: TorchRLEnvironment, *, keep_actions: bool) -> None:
        self._env, self.index = env, env.index
        self._keep_actions = keep_actions
        self._reward_keys = [("next", *as_path(key)) for key in env.env.reward_keys]

    def bind(
        self, memory: SharedMemory, options: RowOptions, written: Mapping[Key, Tensor]
    ) -> None:
        """Find the rows; ``written`` is what a policy writes, ``[episodes, *shape]``."""
        super().bind(memory, options, written)
        dtypes = {field.key: field.dtype for field in memory.layout.fields}
        own = slice(self.rows.start, self.rows.stop)
        arrays = memory.fields(0)
        self._written = {key: values[own] for key, values in written.items()}
        self._rewards = [
            tensor_over(arrays[key][own], dtypes[key]).flatten(1) for key in self._reward_keys
        ]

    def begin(self, seeds: Sequence[int], count: int) -> None:
        """Begin an episode in each environment; those of so many count."""
        self.seeds = seeds
        self._env.reset(seeds, 0)
        self.rewards = [[] for _ in self.rows]
        self._actions: list[dict[Key, Tensor]] = []
        self._going = torch.arange(len(self.rows)) < count

    def step(self) -> bool:
        """Step with what the policy wrote; returns whether all that count have ended."""
        before = self._env.episodes.reshape(-1).clone()
        if self._keep_actions:
            self._actions.append({key: rows.clone() for key, rows in self._written.items()})
        self._env.step(0, 0)
        rewards = torch.cat([values.double() for values in self._rewards], -1).mean(-1)
        for at in self._going.nonzero().flatten().tolist():
            self.rewards[at].append(rewards[at].item())
        self._going &= self._env.episodes.reshape(-1) == before
        return not self._going.any()

    def actions(self, row: int) -> list[dict[Key, Tensor]]:
        """Of each step, what a policy wrote for all rows, by key; for `step_again`."""
        return self._actions

    def step_again(self, actions: Mapping[Key, Tensor], row: int) -> tuple[float, bool]:
        """Step with actions that were kept; returns a row's reward, and whether it has ended."""
        for key, values in actions.items():
            self._written[key].copy_(values)
        self.step()
        return self.rewards[row][-1], not self._going[row]


Scene = GymScene | VectorScene | TorchRLScene


class _Episode(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the rewards of an episode, and the actions for a replay; begins no other by itself."""

    def __init__(self, env: gym.Env[Any, Any], *, keep_actions: bool) -> None:
        super().__init__(env)
        self._keep_actions = keep_actions
        self.rewards: list[float] = []
        self.actions: list[Any] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A new episode; without a seed, which asks for the next one, nothing happens."""
        if seed is not None:
            outcome = self.env.reset(seed=seed)
            self._observation = checked_reset(outcome)
            self.rewards, self.actions = [], []
            return outcome
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """A step, which is kept in mind."""
        if self._keep_actions:
            self.actions.append(deepcopy(action))
        self._observation, reward, terminated, truncated, info = self.env.step(action)
        self.rewards.append(checked_reward(reward))
        return self._observation, reward, terminated, truncated, info
