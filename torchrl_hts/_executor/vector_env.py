"""A batch of gymnasium environments, whose transitions lie in its rows of the slots.

It does for k rows at once what `GymEnvironment` does for one: the batches of k single environments
with the same seeds are the same, bit for bit. Knows nothing of torch.

Axes: k environments of the batch, S slots, T steps of a round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv

from torchrl_hts._executor import space_texts
from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_env import RowOptions
from torchrl_hts._executor.info import info_number, info_numbers
from torchrl_hts._executor.observations import ObservationReader
from torchrl_hts._executor.spaces import own_spaces, seed_spaces
from torchrl_hts._executor.trial_observations import Observations
from torchrl_hts._executor.values import check_rewards
from torchrl_hts._executor.vector_actions import vector_action_reader
from torchrl_hts._executor.vector_engine import Batch, Mask, VectorEngine
from torchrl_hts._executor.vector_play import vector_observations
from torchrl_hts._rounds.shared_memory import Array, SharedMemory
from torchrl_hts.env_state import names_of, restore_environment, save_environment
from torchrl_hts.env_state.compressed import compressed, decompressed
from torchrl_hts.env_state.names import Names
from torchrl_hts.errors import CannotSaveError, EnvError

__all__ = ["VectorEnvironment"]

_MAGIC = b"torchrl_hts batch of environments 1\n"


class VectorEnvironment:
    """A batch of k environments and its rows ``[S][k, T, *shape]`` of every field.

    Args:
        env: the batch.
        index: its index among the entries of ``create_env_fn``.
        generators: that it draws from besides its own ones, entered already; by default new ones.
            All of its environments share them.

    Attributes:
        action, rewards: of the last step, as the engine takes and gives them.
        takes_seeds: see `VectorEngine`.
        episodes: number of the present one of each environment, int64 ``[k]``; steps change it.

    Raises:
        EnvError: see `VectorEngine`.
    """

    plays_in_background = False

    def __init__(self, env: Batch, index: int, generators: Generators | None = None) -> None:
        self.env = env
        self.index = index
        self._generators = generators or Generators(index)
        self._engine = VectorEngine(env)
        self._reader = ObservationReader(self._engine.observation_space)
        self._singles = [single.env for single in self._engine.singles]
        self._names: list[Names | None] = []
        for single in self._singles:
            own_spaces(single)
            self._names.append(None)
            with contextlib.suppress(Exception):  # which is met again, and told, when it is saved
                self._names[-1] = names_of(single)
        texts = space_texts.of_spaces(self._engine.observation_space, self._engine.action_space)
        if self._singles:
            texts = {**space_texts.of_env(self._singles[0]), **texts}
        self.description = replace(self._engine.description, texts=texts)
        self.takes_seeds = self._engine.takes_seeds
        self.action: Any = None
        self.rewards: Array = np.zeros(self._engine.num_envs)

    def bind(self, memory: SharedMemory, options: RowOptions) -> None:
        """Find the rows of these environments; call once the layout is known."""
        layout, count = memory.layout, self._engine.num_envs
        self.rows = layout.rows(self.index)
        slots = [memory.fields(slot) for slot in range(layout.num_slots)]

        def rows(*key: str) -> list[Array]:  # [T, k, *shape] each
            return [slot[key][self.rows.start : self.rows.stop].swapaxes(0, 1) for slot in slots]

        def words(*key: str) -> list[Array]:  # [T, k] each
            return [array.reshape(array.shape[:2]) for array in rows(*key)]

        def kept(*key: str) -> list[Array] | None:  # private entries may have no rows
            return rows(*key) if key in slots[0] else None

        self._all_envs = layout.all_envs
        self._numbers = layout.first_env + np.arange(self.rows.start, self.rows.stop)
        self._max_frames = options.max_frames_per_traj
        if self._max_frames and self._engine.obstacle is not None:
            raise EnvError(
                f"episodes are to be cut off, and {type(self.env).__name__} can't begin some of "
                f"its environments anew: {self._engine.obstacle.reason}. Let the environments end "
                "their episodes themselves, without max_frames_per_traj or max_frames_per_episode"
            )
        keys = [field.key for field in self._reader.fields]
        self._root = [kept(*key) for key in keys]
        self._after = [
            kept("next", *key) if options.write_next_observation else None for key in keys
        ]
        self._done = words("next", "done")
        self._terminated = words("next", "terminated")
        self._truncated = words("next", "truncated")
        self._reward = words("next", "reward")
        self._trajectory = words("collector", "traj_ids")
        self._infos = [(key, words("next", *key)) for key in options.info_keys]
        self._action = vector_action_reader(self._engine.action_space, count, ("action",), rows)
        self._carried = [(rows(*c.key), rows(*c.source), c.start) for c in options.carried]
        self._is_init = words("is_init") if options.write_is_init else None
        self._step_count = (
            (words("step_count"), words("next", "step_count")) if self._max_frames else None
        )

    def reset(self, seeds: int | Sequence[int], steps: int) -> None:
        """Start over with new episodes, after so many steps of each environment in all.

        Args:
            seeds: of each environment.
            steps: see `GymEnvironment.reset`.
        """
        seeds = [seeds] if isinstance(seeds, int) else seeds
        self._generators.seed(*seeds)
        for single, seed in zip(self._singles, seeds, strict=False):
            seed_spaces(single, seed)
        self._generators.enter()
        count = self._engine.num_envs
        self._current = self._reader.read(self._engine.reset(seeds), count)
        self.episodes = np.full(count, steps, np.int64)
        self._length = np.zeros(count, np.int64)
        self._state = [
            np.full(root[0].shape[1:], start, root[0].dtype) for root, _, start in self._carried
        ]
        self._name_trajectories()

    def observations(self) -> Observations:
        """What resets with seeds of their own give."""
        return vector_observations(self._engine, self._reader)

    def save(self) -> bytes:
        """All that the coming steps depend on, and that is not in the slots.

        Raises:
            CannotSaveError: unless it is a `SyncVectorEnv` of environments that can be saved.
        """
        if type(self.env) is not SyncVectorEnv:
            raise CannotSaveError(
                f"{type(self.env).__name__} has no way to save the states of its environments; "
                "give create_env_fn a gymnasium.vector.SyncVectorEnv, or single environments, if "
                "runs are to be resumed in the middle of their episodes"
            )
        self._generators.enter()
        own = (self._current, self._length, self._state, self.episodes)
        first, *others = zip(self._singles, self._names, strict=True)
        extra = (*own, self._generators.state())
        parts = [save_environment(first[0], extra, names=first[1])]
        parts += [save_environment(single, names=names) for single, names in others]
        sizes = np.array([len(parts), *map(len, parts)], "<i8").tobytes()
        return _MAGIC + compressed(sizes + b"".join(parts))

    def restore(self, state: bytes) -> None:
        """Go on where `save` was called, in another process and another batch maybe."""
        parts = self._parts(state)
        self._generators.enter()
        self._engine.reset(range(len(parts)))  # what a batch keeps besides is then as at a start
        own = [
            restore_environment(single, part, names=names)
            for single, part, names in zip(self._singles, parts, self._names, strict=True)
        ]
        self._current, self._length, self._state, self.episodes, generators = own[0]
        self._generators.restore(generators)
        self._name_trajectories()

    def _parts(self, state: bytes) -> list[bytes]:
        """The states of the environments of a batch."""
        if not state.startswith(_MAGIC):
            raise CannotSaveError("the state is of a single environment, and this is a batch")
        content = decompressed(state[len(_MAGIC) :])
        count = int(np.frombuffer(content, "<i8", 1)[0])
        if count != len(self._singles):
            raise CannotSaveError(
                f"the state is of a batch of {count} environments, and this one has "
                f"{self._engine.num_envs}, of which {len(self._singles)} can be restored"
            )
        start, parts = 8 * (1 + count), []
        for size in np.frombuffer(content, "<i8", count, 8).tolist():
            parts.append(content[start : start + size])
            start += size
        return parts

    def write_observation(self, slot: int, t: int) -> None:
        """Write what the policy reads at step ``t``."""
        for rows, value in zip(self._root, self._current, strict=True):
            if rows is not None:
                rows[slot][t] = value
        if self._is_init is not None:
            self._is_init[slot][t] = self._length == 0
        if self._step_count is not None:
            self._step_count[0][slot][t] = self._length
        for (root, _, _), state in zip(self._carried, self._state, strict=True):
            root[slot][t] = state

    def step(self, slot: int, t: int) -> int:
        """Step with the actions at ``t`` and write the transitions; returns how many ended."""
        self._generators.enter_step()
        engine = self._engine
        self.action = self._action(slot, t)
        observations, self.rewards, terminated, truncated, infos = engine.step(self.action)
        values = self._reader.read(observations, engine.num_envs)
        check_rewards(self.rewards)
        try:
            self._reward[slot][t] = self.rewards
        except FloatingPointError:  # by np.seterr, which is for the environments' own sums
            with np.errstate(all="ignore"):
                self._reward[slot][t] = self.rewards
        self._length += 1
        done = ended = terminated | truncated
        if self._max_frames:
            truncated = truncated | (self._length >= self._max_frames)
            done = terminated | truncated
        num_done = _count_of(done)
        for rows, value in zip(self._after, values, strict=True):
            if rows is not None:
                rows[slot][t] = value
        self._done[slot][t] = done
        self._terminated[slot][t] = terminated
        self._truncated[slot][t] = truncated
        self._trajectory[slot][t] = self._trajectories
        if self._infos:
            self._write_infos(infos, ended, slot, t)
        if self._step_count is not None:
            self._step_count[1][slot][t] = self._length
        for index, (_, left, _) in enumerate(self._carried):
            self._state[index] = left[slot][t].copy()
        self._current = values
        if num_done:
            self.rewards = self.rewards.copy()  # an engine may write there as it resets
            if engine.begins_itself and _count_of(ended):
                self._write_last(infos, ended, slot, t)
            self._begin(done, done & ~ended if engine.begins_itself else done)
        return num_done

    def _begin(self, done: Mask, to_begin: Mask) -> None:
        """New episodes of what is done; those of `to_begin` have to be begun."""
        if num_to_begin := _count_of(to_begin):
            self._generators.enter()
            merged = [now.copy() for now in self._current]  # first: an engine may write there
            fresh = self._engine.begin(to_begin)
            count = self._engine.num_envs
            mine: Any = to_begin
            if _length_of(fresh) != count:  # only those that were begun
                count, mine = num_to_begin, slice(None)
            for now, new in zip(merged, self._reader.read(fresh, count), strict=True):
                now[to_begin] = new[mine]
            self._current = merged
        self.episodes[done] += 1
        self._length[done] = 0
        for state, (_, _, start) in zip(self._state, self._carried, strict=True):
            state[done] = start
        self._name_trajectories()

    def _name_trajectories(self) -> None:
        self._trajectories = self._numbers + self._all_envs * self.episodes

    def _write_last(self, infos: Any, ended: Mask, slot: int, t: int) -> None:
        """In place of first observations, the last ones of the episodes before."""
        indices = np.flatnonzero(ended).tolist()
        lasts = self._engine.last_observations(infos, indices)
        for index, last in zip(indices, lasts, strict=True):
            for rows, value in zip(self._after, self._reader.read(last), strict=True):
                if rows is not None:
                    rows[slot][t][index] = value

    def _write_infos(self, infos: Any, ended: Mask, slot: int, t: int) -> None:
        """The numbers of this step.

        Those of a plain `SyncVectorEnv` are its environments' own. Of other engines, those of what
        has been begun anew are in final_info, or there are none: NaN. A wrapper that counts
        episodes tells them beside.
        """
        engine = self._engine
        alone = type(self.env) is SyncVectorEnv
        for key, numbers in self._infos:
            if alone:
                numbers[slot][t] = [info_number(single.info, key) for single in engine.singles]
                continue
            found = info_numbers(infos, key, engine.num_envs)
            if engine.begins_itself and key[0] not in engine.episode_keys:
                final = info_numbers(infos.get("final_info", {}), key, engine.num_envs)
                found[ended] = final[ended]
            numbers[slot][t] = found

    def close(self) -> None:
        """Close all."""
        self._engine.close()


def _count_of(mask: Mask) -> int:
    """How many of some flags are set; several times as fast as numpy with few of them."""
    return mask.tobytes().count(1)


def _length_of(observations: Any) -> int:
    """For how many environments there are observations."""
    while isinstance(observations, dict):
        observations = next(iter(observations.values()))
    return len(observations)
