"""A gymnasium ``VectorEnv``, in whichever way it resets: k environments that step as one.

The batches of a collector have no row for a step that only resets. So what has ended is begun anew
before the next step: by the engine itself (`AutoresetMode.SAME_STEP`), or by a reset of those
environments alone (``options={"reset_mask": ...}``). Knows nothing of torch.

Axes: k environments of the batch.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import (
    AsyncVectorEnv,
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
    VectorWrapper,
)
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import (
    DictInfoToList,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
)

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.old_gym import checked_reset, of_reset, of_step
from torchrl_hts._executor.vector_singles import read_singly
from torchrl_hts._rounds.shared_memory import Array
from torchrl_hts.errors import EnvError, InvalidValueError

__all__ = ["Batch", "Mask", "VectorEngine", "autoreset_mode"]

Batch = VectorEnv[Any, Any, Any]
Mask = npt.NDArray[np.bool_]


class VectorEngine:
    """What a batch of environments does, the same for each kind of engine.

    Args:
        env: the batch.

    Attributes:
        num_envs: k.
        observation_space, action_space: of one environment.
        begins_itself: whether what has ended is at its next episode when a step returns.
        takes_seeds: whether its reset takes any; else it takes one where it is made.
        obstacle: why none can be begun anew with the others left alone; None if they can.
        episode_keys: names in infos below which a wrapper tells of episodes that have ended.
        description: what the main process needs to know of it.
        singles: its environments, where they are at hand: those of a `SyncVectorEnv`.

    Raises:
        TypeError: if what an environment observes is no array of a fixed shape.
        EnvError: if it is empty, or its infos are a list. Also if its spaces are not those of k
            equal environments, or if it can't begin what has ended before the next step.
    """

    def __init__(self, env: Batch) -> None:
        if any(isinstance(layer, DictInfoToList) for layer in _layers(env)):
            raise EnvError(
                f"{_name(env)} is wrapped in gymnasium.wrappers.vector.DictInfoToList, whose infos "
                "are a list; expected a dict of arrays: leave that wrapper out"
            )
        self.env = env
        self.num_envs = _count(env)
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        _check_space("observation", env, self.observation_space, env.observation_space)
        _check_space("action", env, self.action_space, env.action_space)
        self.takes_seeds = not _is_envpool(env)
        self.begins_itself = autoreset_mode(env) == AutoresetMode.SAME_STEP
        self.obstacle = _obstacle(env)
        if not self.begins_itself and self.obstacle is not None:
            raise EnvError(
                f"{_name(env)} begins an episode at the step after the last, which would waste a "
                f"row of the batch, and can't begin it before: {self.obstacle.reason}. "
                f"{self.obstacle.advice}"
            )
        self.episode_keys = {
            layer._stats_key for layer in _layers(env) if isinstance(layer, RecordEpisodeStatistics)
        }
        self.description = GymDescription(
            self.observation_space, self.action_space, num_envs=self.num_envs, is_batch=True
        )
        self._seed_as: Callable[[Sequence[int]], Any] | None = None
        self.singles = read_singly(env)

    def reset(self, seeds: Sequence[int]) -> Any:
        """Begin new episodes, each environment with its seed; returns the observations.

        An engine that takes one number for all gets the first; it and those that take none are
        warned of.
        """
        if self._seed_as is None:
            return self._first_reset(seeds)
        return checked_reset(self.env.reset(seed=self._seed_as(seeds)))

    def _first_reset(self, seeds: Sequence[int]) -> Any:
        if not self.takes_seeds:
            warnings.warn(
                f"{_name(self.env)} takes its seed where it is made, and none that is given "
                "later reaches it: give envpool.make a seed of its own for each batch",
                stacklevel=2,
            )
            self._seed_as = _as_none
            return self.reset(seeds)
        if isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv):  # take lists
            self._seed_as = _as_list
            try:
                return self.reset(seeds)
            except TypeError as error:
                if (told := of_reset(error)) is not None:
                    raise told from error
                raise
        forms: tuple[Callable[[Sequence[int]], Any], ...] = (_as_list, _as_array)
        for form in forms:
            try:
                outcome = self.env.reset(seed=form(seeds))
            except (TypeError, ValueError, gym.error.Error):  # of this form, or met again below
                continue
            self._seed_as = form
            return checked_reset(outcome)
        if self.num_envs > 1:
            warnings.warn(
                f"{_name(self.env)} takes one seed for all of its environments: it is given that "
                "of the first, and what they do depends on how many share it",
                stacklevel=2,
            )
        self._seed_as = _as_one
        return self.reset(seeds)

    def begin(self, mask: Mask) -> Any:
        """Begin new episodes of some environments, which need no seed; returns the observations.

        They are of all environments, or of those that were begun alone.
        """
        options = None if self.num_envs == 1 else {"reset_mask": mask}
        return checked_reset(self.env.reset(options=options))

    def step(self, actions: Any) -> tuple[Any, Array, Mask, Mask, Any]:
        """Step all.

        Returns:
            Observations, as the engine gives them; rewards, terminated and truncated ``[k]``; and
            the infos.

        Raises:
            InvalidValueError: if rewards or flags are not one of each environment.
        """
        try:
            observations, rewards, terminated, truncated, infos = self.env.step(actions)
        except (TypeError, ValueError) as error:
            if (told := of_step(error)) is not None:
                raise told from error
            raise
        return (
            observations,
            self._of_each("rewards", rewards, "biuf"),
            self._of_each("terminations", terminated, "b"),
            self._of_each("truncations", truncated, "b"),
            infos,
        )

    def _of_each(self, what: str, given: Any, kinds: str) -> Array:
        array = given if type(given) is np.ndarray else np.asarray(given)
        if array.shape != (self.num_envs,) or array.dtype.kind not in kinds:
            raise InvalidValueError(
                f"the environments returned {what} of shape {array.shape} and data type "
                f"{array.dtype}; expected {'flags' if kinds == 'b' else 'numbers'} of shape "
                f"({self.num_envs},), one of each environment: return them so, or make them so in "
                "a gymnasium.vector.VectorWrapper"
            )
        return array

    def last_observations(self, infos: Any, ended: Iterable[int]) -> list[Any]:
        """The true last observations of episodes that the engine has followed by the next.

        Raises:
            InvalidValueError: if the infos lack one.
        """
        found = infos.get("final_obs") if isinstance(infos, Mapping) else None
        lasts = [None if found is None else found[index] for index in ended]
        if any(last is None for last in lasts):
            raise InvalidValueError(
                "the environments ended episodes in AutoresetMode.SAME_STEP, and infos lacks "
                "'final_obs' with the last observation of each: return them there, or make the "
                "batch in another autoreset_mode"
            )
        return lasts

    def close(self) -> None:
        """Close all."""
        self.env.close()


def _as_none(seeds: Sequence[int]) -> None:
    return None


def _as_list(seeds: Sequence[int]) -> list[int]:
    return list(seeds)


def _as_array(seeds: Sequence[int]) -> npt.NDArray[np.int64]:
    # Of 31 bits: engines of C++ keep them as ints, in which one below 0 says something else.
    return np.array(seeds, np.int64) & 0x7FFF_FFFF


def _as_one(seeds: Sequence[int]) -> int:
    return seeds[0]


def _count(env: Batch) -> int:
    count = getattr(env, "num_envs", None)
    if not isinstance(count, int | np.integer) or count < 1:
        raise EnvError(
            f"{_name(env)} has num_envs={count!r}; expected a batch of at least one environment"
        )
    return int(count)


def _check_space(what: str, env: Batch, one: gym.Space[Any], all_: gym.Space[Any]) -> None:
    """Raise if the space of a batch is not that of k environments with the same space each."""
    if _is_envpool(env) and all_ == one:  # whose space is that of one
        if not getattr(env.unwrapped, "is_async", False):
            return
    elif all_ == batch_space(one, _count(env)):
        return
    raise EnvError(
        f"{_name(env)} has the {what} space {all_!r}; expected a batch of {_count(env)} "
        f"environments with {one!r} each, all of which step together: leave its batch_size out, "
        "and give environments of different spaces as entries of their own"
    )


def autoreset_mode(env: Batch) -> AutoresetMode:
    """How it begins new episodes; at the next step where it doesn't say, as gymnasium has it."""
    mode = (env.metadata or {}).get("autoreset_mode") or AutoresetMode.NEXT_STEP
    return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)


def _layers(env: Batch) -> Iterator[Batch]:
    """The wrappers around a batch, from the outside."""
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env


class Obstacle(NamedTuple):
    """Why some environments of a batch can't be begun anew by themselves, and what to do."""

    reason: str
    advice: str


def _obstacle(env: Batch) -> Obstacle | None:
    own = env.unwrapped
    if (
        isinstance(own, AsyncVectorEnv)
        and not own.shared_memory
        and autoreset_mode(env) == AutoresetMode.NEXT_STEP
    ):  # a process of it forgets that it is to reset only where it writes to shared memory
        return Obstacle(
            "without shared memory what has been begun anew is reset once more at its next step",
            "Make it with autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED, or with "
            "shared_memory=True",
        )
    if _count(env) == 1:
        return None
    if not _takes_a_mask(own):
        return Obstacle(
            "its reset takes no options['reset_mask']",
            "Make it with gymnasium.make_vec(..., vectorization_mode='sync'), or, if its class "
            "takes one, with autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP",
        )
    takes_mask_away = isinstance(own, SyncVectorEnv | AsyncVectorEnv)  # from the options
    for layer in _layers(env):
        if isinstance(layer, NormalizeObservation | NormalizeReward) or (
            takes_mask_away and isinstance(layer, RecordEpisodeStatistics)
        ):
            name = _name(layer)
            return Obstacle(
                f"{name} around a batch forgets what it has counted of all environments",
                "Put it around the single environments, as gymnasium.make_vec(..., "
                f"wrappers=[gymnasium.wrappers.{name}]) does, or normalise with RunningNorm and "
                "RunningRewardNorm",
            )
    return None


def _takes_a_mask(env: object) -> bool:
    """Whether an engine's own methods speak of the option that resets some environments."""
    if _is_envpool(env):
        return True
    return any(
        isinstance(method, types.FunctionType) and "reset_mask" in method.__code__.co_consts
        for cls in type(env).__mro__
        if cls is not VectorEnv
        for method in vars(cls).values()
    )


def _is_envpool(env: object) -> bool:
    own = getattr(env, "unwrapped", env)
    return any(cls.__module__.split(".")[0] == "envpool" for cls in type(own).__mro__)


def _name(env: object) -> str:
    return type(env).__name__
