"""What the spaces of an environment are, in words, by which another run is told from the same one.

States of collectors hold these texts: what they say of a space has to stay as it is. Knows nothing
of torch, whose tensors and specs are asked what they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from torchrl_hts._executor.background_env import BackgroundEnv
from torchrl_hts._executor.spaces import all_layers

__all__ = ["WITHIN", "of_env", "of_spaces", "of_specs"]

WITHIN = " within the wrappers"
_MOST_SHOWN = 8  # bounds, where they differ
_KINDS = ("full_observation_spec", "full_action_spec")


def of_env(env: gym.Env[Any, Any]) -> dict[str, str]:
    """The spaces of an environment, and those within its wrappers, where they are at hand.

    Wrappers may hide what matters: ``ClipAction`` has no bounds, and ``FlattenObservation`` no
    structure.
    """
    found = of_spaces(env.observation_space, env.action_space)
    *_, base = all_layers(env)
    if not isinstance(base, BackgroundEnv):  # one that is elsewhere shows its wrappers' spaces
        with suppress(Exception):  # of what its wrappers may replace, so that nobody else reads it
            found |= of_spaces(base.observation_space, base.action_space, WITHIN)
    return found


def of_spaces(observation: Any, action: Any, where: str = "") -> dict[str, str]:
    """Texts of two spaces and their parts, by name; nothing of what is no space.

    Args:
        observation, action: the spaces.
        where: the environment has them, for the names.
    """
    found: dict[str, str] = {}
    for what, space in (("observation", observation), ("action", action)):
        if isinstance(space, gym.Space):
            found |= _parts(f"{what} space{where}", space)
    return found


def of_specs(specs: Any) -> dict[str, str]:
    """Texts of the observation and action specs of a TorchRL environment, by name.

    Args:
        specs: ``env.specs``, on the CPU.
    """
    found = {}
    for (_, kind, *key), spec in specs.items(True, True):
        if kind in _KINDS:
            name = f"{kind[5:].replace('_', ' ')} {'.'.join(key)!r}"
            says = [str(tuple(spec.shape)), str(spec.dtype)]
            with suppress(NotImplementedError):  # of specs that are stacks of different ones
                says = [*_domain(spec.space), *says]
            found[name] = f"{_kind(spec)}({', '.join(says)})"
    return found


def _parts(name: str, space: gym.Space[Any]) -> Iterator[tuple[str, str]]:
    """A space, then what it is made up of."""
    parts: list[tuple[Any, gym.Space[Any]]] = []
    if isinstance(space, gym.spaces.Dict):
        parts = sorted(space.spaces.items(), key=lambda item: str(item[0]))
    elif isinstance(space, gym.spaces.Tuple):
        parts = list(enumerate(space.spaces))
    yield name, f"{_kind(space)}({', '.join(repr(key) for key, _ in parts) or _text(space)})"
    for key, part in parts:
        yield from _parts(f"{name} at {key!r}", part)


def _text(space: gym.Space[Any]) -> str:
    """What values a space has, if it isn't made up of others."""
    spaces, says = gym.spaces, [str(space.shape), str(space.dtype)]
    if isinstance(space, spaces.Box):
        says = [_numbers(space.low), _numbers(space.high), *says]
    elif isinstance(space, spaces.Discrete):
        says = [str(space.n), f"start={space.start}", says[1]]
    elif isinstance(space, spaces.MultiDiscrete):
        says = [_numbers(space.nvec), f"start={_numbers(space.start)}", *says]
    elif not isinstance(space, spaces.MultiBinary):
        return ""
    return ", ".join(says)


def _kind(space: Any) -> str:
    """The name of the class of gymnasium, or TorchRL, that a space or a spec is of."""
    own = ("gymnasium.", "torchrl.")
    return next(c.__name__ for c in type(space).__mro__ if c.__module__.startswith(own))


def _domain(space: Any) -> list[str]:
    """What values the space of a spec has."""
    if hasattr(space, "low"):
        return [_numbers(bound.double().numpy()) for bound in (space.low, space.high)]
    if hasattr(space, "boxes"):
        return [f"[{', '.join(chain(*map(_domain, space.boxes)))}]"]
    return [str(space.n)] if hasattr(space, "n") else []


def _numbers(array: NDArray[Any]) -> str:
    """One number if all are equal, a few if there are few, and else their range and a digest.

    Of floats no more than six digits count: the last ones may be others on another machine.
    """
    numbers = np.ravel(array)
    if (numbers == numbers[:1]).all():
        return "".join(map(_number, numbers[:1]))
    if numbers.size <= _MOST_SHOWN:
        return f"[{', '.join(map(_number, numbers))}]"
    with np.errstate(all="ignore"):
        bits = numbers.astype("<f4" if numbers.dtype.kind == "f" else "<i8").tobytes()
    sha = hashlib.sha256(bits).hexdigest()[:8]
    return f"[{_number(numbers.min())} to {_number(numbers.max())}, digest {sha}]"


def _number(number: Any) -> str:
    return f"{number:.6g}" if isinstance(number, np.floating) else str(number)
