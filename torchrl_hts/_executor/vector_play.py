"""What a batch of environments shows before the first round: at resets, and in random play."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space

from torchrl_hts._executor.observations import ObservationReader
from torchrl_hts._executor.trial_observations import MOST_PLAYED, Observations, kept
from torchrl_hts._executor.vector_engine import Batch, VectorEngine
from torchrl_hts._rounds.shared_memory import Array

__all__ = ["VectorPlay", "vector_observations"]

_RESETS = 4  # environments whose first observations are kept


class VectorPlay:
    """A batch of environments and what it takes to play it at random; see `probe.RandomPlay`.

    Episodes that end are followed by others within the step.
    """

    def __init__(self, env: Batch) -> None:
        self._engine = VectorEngine(env)
        self._reader = ObservationReader(self._engine.observation_space)
        self.description = self._engine.description
        self._actions = batch_space(self._engine.action_space, self._engine.num_envs)
        self._actions.seed(0)
        self._resets: list[Array] = []
        # Steps since the reset, and what there was to see, of the first environment.
        self._played: list[tuple[int, list[Array]]] = []
        self._length = 0

    def reset(self) -> None:
        """Begin an episode in each environment."""
        count = self._engine.num_envs
        self._current = self._reader.read(self._engine.reset(range(count)), count)
        self._resets = [array[:_RESETS].copy() for array in self._current]

    def choose(self) -> None:
        """Draw the next actions."""
        if self._length and len(self._played) < MOST_PLAYED:
            self._played.append((self._length, [array[:1].copy() for array in self._current]))
        self._action = self._actions.sample()

    def step(self) -> bool:
        """Make a step; there is nothing to reset after it."""
        engine = self._engine
        observations, _, terminated, truncated, _ = engine.step(self._action)
        self._current = self._reader.read(observations, engine.num_envs)
        ended = terminated | truncated
        self._length = 0 if ended[0] else self._length + 1
        if not engine.begins_itself and ended.any():
            engine.begin(ended)
        return False

    def observations(self) -> Observations:
        """What there was to see."""
        return _observations(self._reader, self._resets, self._played)


def vector_observations(engine: VectorEngine, reader: ObservationReader) -> Observations:
    """What a reset of a batch gives, with the seeds 0, 1, ..."""
    arrays = reader.read(engine.reset(range(engine.num_envs)), engine.num_envs)
    return _observations(reader, [array[:_RESETS].copy() for array in arrays])


def _observations(
    reader: ObservationReader,
    resets: Sequence[Array],
    played: Sequence[tuple[int, list[Array]]] = (),
) -> Observations:
    """Of resets, ``[m, *shape]`` for each field, and of moments of random play, one row each."""
    num_resets = len(resets[0])
    moments = kept(sum(array.nbytes for array in resets) // num_resets)
    lengths = (*[0] * num_resets, *(length for length, _ in played))[:moments]
    values: dict[Any, Array] = {}
    for index, field in enumerate(reader.fields):
        found = [resets[index], *(arrays[index] for _, arrays in played)]
        values[field.key] = np.concatenate(found)[:moments]
    return Observations(values, lengths, min(num_resets, moments))
