"""A gymnasium environment whose transitions lie in its row of the slots. Knows nothing of torch.

Batches look as they do with TorchRL's ``GymEnv``: a Box, Discrete, MultiDiscrete or MultiBinary
observation is called ``"observation"``, a Dict space gives its own (nested) keys. Values keep the
data type of their space; rewards are float32; ``("next", ...)`` of an episode's last step holds
its true last observation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium as gym

from torchrl_hts._executor import space_texts
from torchrl_hts._executor.background_env import BackgroundEnv, overlaps
from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_actions import action_reader
from torchrl_hts._executor.info import InfoKey, info_number
from torchrl_hts._executor.observations import ObservationReader, with_own_memory
from torchrl_hts._executor.old_gym import checked_reset, of_done, of_reset, of_step
from torchrl_hts._executor.spaces import own_spaces, seed_spaces
from torchrl_hts._executor.values import FLOAT32_MAX, checked_reward
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array, SharedMemory
from torchrl_hts.env_state import names_of, restore_environment, save_environment
from torchrl_hts.env_state.compressed import compressed, decompressed
from torchrl_hts.env_state.names import Names

__all__ = ["Carried", "GymDescription", "GymEnvironment", "RowOptions"]


@dataclass(frozen=True)
class GymDescription:
    """What the main process needs to know of an environment; the spaces are equal for all.

    Attributes:
        observation_space, action_space: of the environment.
        observations: `trial_observations.Observations` of one of them; None where nobody looked.
        num_envs: how many environments it has, if it is a batch of them.
        is_batch: whether it is one, of a single environment perhaps.
        texts: what its spaces are (`space_texts`); empty where nobody asks.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    observations: Any = None
    num_envs: int = 1
    is_batch: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Carried:
    """What the policy reads back at each step of what it wrote for the step before.

    Attributes:
        key: that it reads at the root.
        source: that it writes: ``("next", *key)``, or the same key.
        start: the value where an episode starts.
    """

    key: Key
    source: Key
    start: float = 0.0


@dataclass(frozen=True)
class RowOptions:
    """How an environment's rows are written.

    Attributes:
        max_frames_per_traj: length at which an episode is truncated; 0: never.
        write_next_observation: False leaves ``("next", observation)`` out (``compact_obs``).
        policy_keys: keys that the policy writes, the action among them.
        carried: what the policy leaves for its next step, and the environment does not keep.
        info_keys: of the numbers in a step's info that are written too.
        write_is_init: whether ``"is_init"``, which the policy reads, is for the collector to write.
    """

    max_frames_per_traj: int
    write_next_observation: bool
    policy_keys: tuple[Key, ...]
    carried: tuple[Carried, ...]
    info_keys: tuple[InfoKey, ...] = ()
    write_is_init: bool = False


class GymEnvironment:
    """One environment and its row ``[S][T, *shape]`` of every field.

    Args:
        env: the environment.
        index: of its unit of the schedule, among this learner's.
        generators: that it draws from besides its own ones, entered already; by default new ones.
    """

    def __init__(
        self, env: gym.Env[Any, Any], index: int, generators: Generators | None = None
    ) -> None:
        self.env = env
        self.index = index
        self._generators = generators or Generators(index)
        self._enter_step = self._generators.enter_step
        own_spaces(env)
        self._names: Names | None = None
        with contextlib.suppress(Exception):  # which is met again, and told, where it is saved
            self._names = names_of(env)
        self.plays_in_background = isinstance(env, BackgroundEnv)
        self.tells = overlaps(env)
        self._has_begun_reset = False
        self._begins_episodes = isinstance(env, BackgroundEnv) and env.begins_episodes
        self.description = GymDescription(
            env.observation_space, env.action_space, texts=space_texts.of_env(env)
        )

    def bind(self, memory: SharedMemory, options: RowOptions) -> None:
        """Find this environment's rows; call once the layout is known."""
        slots = [memory.fields(slot) for slot in range(memory.layout.num_slots)]
        self.rows = memory.layout.rows(self.index)
        (row,) = self.rows

        def rows(*key: str) -> list[Array]:
            return [slot[key][row] for slot in slots]

        self._all_envs = memory.layout.all_envs
        self._number = memory.layout.first_env + row
        self._max_frames = options.max_frames_per_traj

        def kept(*key: str) -> list[Array] | None:  # private entries may have no rows
            return rows(*key) if key in slots[0] else None

        # Of words one by one, a memoryview is written in a fraction of an array's time.
        def words(*key: str, of: Literal["?", "f", "d", "q"]) -> list[Any]:
            return [row.data.cast("B").cast(of) for row in rows(*key)]

        reader = ObservationReader(self.env.observation_space)
        self._read = reader.read

        def written(*prefix: str) -> list[tuple[int, list[Array]]]:
            """Which of the values that are read are written, and where."""
            found = [(at, kept(*prefix, *field.key)) for at, field in enumerate(reader.fields)]
            return [(at, rows) for at, rows in found if rows is not None]

        self._before = written()
        self._after = written("next") if options.write_next_observation else []
        self._done = words("next", "done", of="?")
        self._terminated = words("next", "terminated", of="?")
        self._truncated = words("next", "truncated", of="?")
        self._reward = words("next", "reward", of="f")
        self._trajectory = words("collector", "traj_ids", of="q")
        self._infos = [(key, words("next", *key, of="d")) for key in options.info_keys]
        self._action = action_reader(self.env.action_space, ("action",), rows)
        self._carried = [(rows(*c.key), rows(*c.source), c.start) for c in options.carried]
        self._is_init = rows("is_init") if options.write_is_init else None
        self._step_count = (
            (rows("step_count"), rows("next", "step_count")) if self._max_frames else None
        )

    def begin_reset(self, seed: int) -> None:
        """Get ready for a reset with this seed."""
        assert isinstance(self.env, BackgroundEnv)
        self._generators.seed(seed)
        self._generators.enter()
        seed_spaces(self.env, seed)
        self._has_begun_reset = True
        self.env.begin_reset(seed)

    def reset(self, seed: int, steps: int) -> None:
        """Start over with a new episode, after so many steps of this environment in all."""
        # No environment has had more episodes than steps: these numbers are new (I7: and depend
        # on the environment and its steps alone).
        self._episode = steps
        # All that it may draw from but what its own ``reset`` seeds.
        self._generators.seed(seed)
        if not self._has_begun_reset:  # else it may have drawn from its spaces already
            seed_spaces(self.env, seed)
        self._has_begun_reset = False
        self._begin_episode(seed)

    def _begin_episode(self, seed: int | None) -> None:
        self._generators.enter()
        try:
            outcome = self.env.reset(seed=seed)
        except TypeError as error:
            if (told := of_reset(error)) is not None:
                raise told from error
            raise
        self._observation = checked_reset(outcome)
        self._values = self._read(self._observation)
        self._length = 0
        self._state: list[Array] | None = None

    def save(self) -> bytes:
        """All that the coming steps depend on, and that is not in the slots.

        Raises:
            CannotSaveError: if the environment holds something that can't be saved.
        """
        self._generators.enter()
        observation = with_own_memory(self._observation)
        own = (observation, self._length, self._state, self._episode)
        saved = save_environment(self.env, (*own, self._generators.state()), names=self._names)
        return compressed(saved)

    def restore(self, state: bytes) -> None:
        """Go on where `save` was called, in another process and another environment maybe."""
        self._generators.enter()
        own = restore_environment(self.env, decompressed(state), names=self._names)
        self._observation, self._length, self._state, self._episode, generators = own
        self._values = self._read(self._observation)
        self._generators.restore(generators)

    def write_observation(self, slot: int, t: int) -> None:
        """Write what the policy reads at step ``t``."""
        for at, rows in self._before:
            rows[slot][t] = self._values[at]
        if self._is_init is not None:
            self._is_init[slot][t] = self._length == 0
        if self._step_count is not None:
            self._step_count[0][slot][t] = self._length
        for position, (root, _, start) in enumerate(self._carried):
            root[slot][t] = start if self._state is None else self._state[position]

    def begin_step(self, slot: int, t: int) -> bool:
        """Begin the step at ``t``; False if `step` is to do it all."""
        assert isinstance(self.env, BackgroundEnv)
        self._generators.enter_step()
        return self.env.begin_step(self._action(slot, t))

    def tell_when_over(self, tell: Callable[[], None]) -> None:
        """See `BackgroundEnv`."""
        assert isinstance(self.env, BackgroundEnv)
        self.env.tell_when_over(tell)

    def step(self, slot: int, t: int) -> bool:
        """Step with the action at ``t`` and write the transition; returns if the episode ended."""
        self._enter_step()
        action = self._action(slot, t)
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except (TypeError, ValueError) as error:
            if (told := of_step(error)) is not None:
                raise told from error
            raise
        self._values = values = self._read(observation)
        self._observation = observation
        number = reward if isinstance(reward, float) else checked_reward(reward)
        if not -FLOAT32_MAX <= number <= FLOAT32_MAX:  # or NaN
            number = checked_reward(number)
        self._reward[slot][t] = number
        self._length += 1
        if self._max_frames and self._length >= self._max_frames:
            truncated = True
        try:
            done = bool(terminated or truncated)
        except (TypeError, ValueError) as error:  # arrays, as of several environments
            raise of_done(terminated, truncated) from error
        for at, rows in self._after:
            rows[slot][t] = values[at]
        self._done[slot][t] = done
        self._terminated[slot][t] = terminated
        self._truncated[slot][t] = truncated
        self._trajectory[slot][t] = self._number + self._all_envs * self._episode
        for key, numbers in self._infos:
            numbers[slot][t] = info_number(info, key)
        if self._step_count is not None:
            self._step_count[1][slot][t] = self._length
        if done:
            self._episode += 1
            if not self._begins_episodes:
                self._begin_episode(None)
        elif self._carried:
            self._state = [left[slot][t].copy() for _, left, _ in self._carried]
        return done

    def begin_episode(self) -> bool:
        """Begin the episode that follows on one that has ended; False if it is there."""
        if not self._begins_episodes:  # `step` has done it all
            return False
        assert isinstance(self.env, BackgroundEnv)
        self._generators.enter()
        if self.env.begin_reset(None):
            return True
        self._begin_episode(None)
        return False

    def finish_episode(self) -> None:
        """Wait for the beginning of the episode that has begun."""
        self._begin_episode(None)

    def begin_close(self) -> None:
        """Begin to close what can be closed in the background."""
        if isinstance(self.env, BackgroundEnv):
            self.env.begin_close()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()
