"""Real observations, for what a policy is tried with before the first round.

A space says which arrays may come, not which do: a mask without a legal action, codes that no table
has, probabilities that add up to nothing. So a policy is tried with what an environment itself
gives: at resets with seeds of their own, and in the random play of the probe.

Where there is no probe, the environments of the run are asked, and must not show it afterwards. One
that can be saved is put back; another is asked only if the policy refuses made-up values, and then
made anew.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from torchrl_hts._executor.background_env import BackgroundEnv
from torchrl_hts._executor.observations import ObservationReader
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array
from torchrl_hts.env_state import names_of, restore_environment, save_environment

__all__ = [
    "MOST_PLAYED",
    "Observations",
    "at_resets",
    "gym_observations",
    "gym_reader",
    "kept",
    "observed",
    "observed_and_restored",
    "own_generators",
]

# At most so many resets, and no further one after so long.
_RESETS = 4
_RESETS_S = 0.1

MOST_PLAYED = 16  # moments of random play

_LIMIT_S = 30  # for all of them; a reset that takes longer is cut off
_BYTES = 1 << 22  # of what is kept, but for the first

Seen = TypeVar("Seen")
GymReader = Callable[[Any], dict[Key, Array]]


@dataclass(frozen=True)
class Observations:
    """What an environment gave, at m moments.

    Attributes:
        values: by key, ``[m, *shape]``: arrays of a gymnasium environment, or a TensorDict ``[m]``
            of all that a TorchRL environment gives at its root.
        lengths: for each moment, the steps since its reset.
        num_resets: so many, the first ones, are of resets with the seeds 0, 1, ...; the others are
            of random play.
        masks_actions: whether a mask was in the specs of its actions afterwards.
    """

    values: Any
    lengths: tuple[int, ...]
    num_resets: int
    masks_actions: bool = False


def kept(size: int) -> int:
    """How many moments are kept whose observations take so many bytes each."""
    return max(1, _BYTES // max(1, size))


def at_resets(reset: Callable[[int], Seen], found: Sequence[Seen] = ()) -> list[Seen]:
    """What resets with the seeds 0, 1, ... give: one, and a few more while they are quick.

    Args:
        reset: of a seed.
        found: what the first seeds gave, where that is known.
    """
    began, seen = time.perf_counter(), list(found) or [reset(0)]
    while len(seen) < _RESETS and time.perf_counter() - began < _RESETS_S:
        seen.append(reset(len(seen)))
    return seen


def gym_reader(space: gym.Space[Any]) -> GymReader:
    """A function from an observation to its arrays, which are copies.

    It raises what `ObservationReader.read` does.

    Raises:
        TypeError: see `observation_fields`.
    """
    reader = ObservationReader(space)

    def read(observation: Any) -> dict[Key, Array]:
        arrays = reader.read(observation)
        return {
            field.key: np.array(array) for field, array in zip(reader.fields, arrays, strict=True)
        }

    return read


def gym_observations(
    env: gym.Env[Any, Any], played: Sequence[tuple[int, dict[Key, Array]]] = ()
) -> Observations:
    """What resets of a gymnasium environment give, and what random play met with.

    Args:
        env: the environment.
        played: steps since the reset, and what there was; a reset among them is that of seed 0.
    """
    read = gym_reader(env.observation_space)

    def reset(seed: int) -> dict[Key, Array]:
        if isinstance(env, BackgroundEnv):
            env.begin_reset(seed)
        return read(env.reset(seed=seed)[0])

    resets = at_resets(reset, [arrays for length, arrays in played if not length])
    moments = [*((0, arrays) for arrays in resets), *(each for each in played if each[0])]
    moments = moments[: kept(sum(array.nbytes for array in moments[0][1].values()))]
    return Observations(
        {key: np.stack([arrays[key] for _, arrays in moments]) for key in moments[0][1]},
        tuple(length for length, _ in moments),
        min(len(resets), len(moments)),
    )


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """Inside, the global generators begin anew; afterwards they are as they were."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    if torch is not None:
        torch.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)


def observed(observe: Callable[[], Observations]) -> Observations | None:
    """What a function returns; None if it raises, or takes longer than half a minute.

    The global generators are afterwards as they were.
    """
    try:
        with _limit(_LIMIT_S), own_generators(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first round will give them
            return observe()
    except (Exception, SystemExit, _TooLongError):  # met again, and told, in the first round
        return None


def observed_and_restored(env: gym.Env[Any, Any]) -> tuple[Observations | None, bool]:
    """What a gymnasium environment gives at resets, and whether it is afterwards as it was.

    It is left alone if it can't be saved.
    """
    try:
        names = names_of(env)
        state = save_environment(env, names=names)
    except Exception:
        return None, True
    found = observed(lambda: gym_observations(env))
    if found is None:  # it may have been cut off within a reset
        return None, False
    try:
        restore_environment(env, state, names=names)
    except Exception:
        return found, False
    return found, True


class _TooLongError(BaseException):
    """A reset takes too long; no ``except Exception`` of an environment stops it."""


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def give_up(signum: int, frame: FrameType | None) -> None:
        raise _TooLongError

    if threading.current_thread() is not threading.main_thread():  # where no signals are handled
        yield
        return
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
