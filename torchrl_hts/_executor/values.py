"""What an environment returns, as numbers of the data types that batches hold, or an error.

A value of another data type is converted where that keeps what it says. Rounding is no loss, since
the data type of a space says how exact its values are. It is one if an integer wraps, a finite
number becomes infinite, or a mask is dropped. What an environment has told numpy to raise
(``np.seterr``) is for its own sums, not for these. Knows nothing of torch.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from math import inf, isinf
from typing import Any, TypeGuard

import gymnasium as gym
import numpy as np
from numpy import vdot

from torchrl_hts._rounds.keys import Key, named
from torchrl_hts._rounds.shared_memory import Array, Field
from torchrl_hts.errors import EnvError, InvalidValueError

__all__ = [
    "ARRAY_SPACES",
    "FLOAT32_MAX",
    "another_shape",
    "check_keys",
    "check_rewards",
    "checked_reward",
    "converted",
    "dict_levels",
    "has_arrays",
    "lacking",
    "not_a_number",
    "reward_number",
    "unknown_key",
    "unsupported_observation",
]

ARRAY_SPACES = (
    gym.spaces.Box,
    gym.spaces.Discrete,
    gym.spaces.MultiDiscrete,
    gym.spaces.MultiBinary,
)

FLOAT32_MAX = float(np.finfo(np.float32).max)

# A sum of squares up to this holds no number that the data type can't.
_LARGEST_SQUARES = {
    np.dtype(name): float(np.finfo(name).max) ** 2 for name in ("float16", "float32")
}
_FLOAT32 = np.dtype("float32")


def checked_reward(reward: Any) -> float:
    """A reward as a number that float32 holds: given as a number, or an array or a tensor of one.

    Raises:
        InvalidValueError: if it is no number, is NaN, or is finite and too large for float32.
    """
    number = reward_number(reward)
    if number != number:
        raise _no_number(reward, is_nan=True)
    if not isinf(number) and isinf(_as_float32(number)):
        raise _too_large(number)
    return number


def check_rewards(rewards: Array) -> None:
    """Raise if a reward is NaN, or is finite and too large for float32.

    Args:
        rewards: ``[k]``.
    """
    if rewards.dtype.kind != "f":  # integers of 64 bits are never too large
        return
    # Where the sum of all squares is not more than that of the largest, none is larger.
    if (
        not float(vdot(rewards, rewards)) <= _LARGEST_SQUARES[_FLOAT32]
        and not (np.abs(rewards) <= FLOAT32_MAX).all()
    ):
        for reward in rewards.tolist():  # or infinite, which float32 holds
            checked_reward(reward)


def reward_number(reward: Any) -> float:
    """A reward as a number that float64 holds, which may be NaN.

    Raises:
        InvalidValueError: if it is no number, or is finite and too large for float64.
    """
    if isinstance(reward, float):
        return reward
    if np.ma.is_masked(reward):
        raise _no_number(reward)
    if isinstance(reward, int):
        try:
            return float(reward)
        except OverflowError as error:
            raise _too_large(reward) from error
    try:
        array = np.asarray(reward)
        if array.dtype.kind not in "biufO" or isinstance(array.item(), str | bytes):
            raise _no_number(reward)
        number = float(array.item())
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _no_number(reward) from error
    if isinf(number) and array.item() != number:  # of 80 bits, or a Decimal
        raise _too_large(reward)
    return number


def _no_number(reward: Any, *, is_nan: bool = False) -> InvalidValueError:
    remedy = "TransformReward(env, make), where make returns one number for what it is given"
    if is_nan:
        remedy = (
            "TransformReward(env, numpy.nan_to_num), for instance, if NaN is meant to say "
            "something; with that of gymnasium.wrappers.vector for a VectorEnv"
        )
    elif not np.ma.is_masked(reward) and _shape(reward) not in ((), (1,)):
        remedy = "TransformReward(env, sum), for instance"
    return InvalidValueError(
        f"the environment returned the reward {reprlib.repr(reward)}; expected one number: replace "
        f"it with gymnasium.wrappers.{remedy}"
    )


def _shape(value: Any) -> tuple[int, ...]:
    try:
        return np.shape(value)
    except (TypeError, ValueError, RuntimeError):
        return ()


def _too_large(reward: Any) -> InvalidValueError:
    return InvalidValueError(
        f"the environment returned the reward {reprlib.repr(reward)}; expected one number that "
        f"float32 holds, which ends at {FLOAT32_MAX:.5g}: scale it with "
        "gymnasium.wrappers.TransformReward, or that of gymnasium.wrappers.vector for a VectorEnv"
    )


def _as_float32(number: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(number))


def converted(value: Any, field: Field) -> Array:
    """A value in the data type of its field.

    Raises:
        InvalidValueError: where that would change what it says.
    """
    name, expected = ".".join(field.key), field.storage_dtype
    if np.ma.is_masked(value):
        raise InvalidValueError(
            f"the environment returned {name!r} with masked elements, which a batch does not keep: "
            "fill them (numpy.ma.filled) in a gymnasium.ObservationWrapper"
        )
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors elsewhere
        raise InvalidValueError(
            f"the environment returned {name!r} as a {type(value).__name__} that is no array: "
            f"{error}"
        ) from error
    kind = found.dtype.kind
    if kind == "O" and found.ndim == 0:
        raise InvalidValueError(
            f"the environment returned {name!r} as a {type(value).__name__}, "
            f"{reprlib.repr(value)}; its observation space says {expected}: return numbers, or "
            "make some of it in a gymnasium.ObservationWrapper"
        )
    if expected.kind == "f" and kind in "biuf":
        return _as_floats(found, field)
    if np.can_cast(found.dtype, expected, "safe"):
        return found.astype(expected)
    if kind in "iu" and expected.kind in "iub":
        made = found.astype(expected)
        if (made == found).all():
            return made
    wrapper = "in a gymnasium.ObservationWrapper"
    remedy = f"return numbers, or make some of it {wrapper}"
    if kind in "biuf":
        remedy = f"convert it {wrapper}, or make the space a Box of {found.dtype}"
    raise InvalidValueError(
        f"the environment returned {name!r} of data type {found.dtype}"
        f"{f' with values from {found.min()} to {found.max()}' if kind in 'iu' else ''}"
        f"; its observation space says {expected}: {remedy}"
    )


def _as_floats(found: Array, field: Field) -> Array:
    expected = field.storage_dtype
    if found.dtype == np.float64 and vdot(found, found) <= _LARGEST_SQUARES.get(expected, inf):
        try:
            return found.astype(expected)
        except FloatingPointError:  # by np.seterr; without it this costs nothing
            return _quietly(found, expected)
    made = _quietly(found, expected)
    lost = np.isinf(made) & np.isfinite(found)
    if lost.any():
        raise InvalidValueError(
            f"the environment returned {'.'.join(field.key)!r} with the value "
            f"{found[lost].flat[0]!s}; its observation space says {expected}, which ends at "
            f"{np.finfo(expected).max:.5g}: scale it with a gymnasium.ObservationWrapper, or "
            "a gymnasium.vector.VectorObservationWrapper"
        )
    return made


def _quietly(found: Array, expected: np.dtype[Any]) -> Array:
    with np.errstate(all="ignore"):
        made: Array = found.astype(expected)
    return made


def check_keys(what: str, space: gym.Space[Any], path: tuple[Any, ...] = ()) -> None:
    """Refuse keys of Dict spaces, at any depth, that are no strings.

    Args:
        what: ``"observation"`` or ``"action"``.
        space: the space.
        path: keys under which it lies.

    Raises:
        EnvError: which names the key, and what renames it.
    """
    if not isinstance(space, gym.spaces.Dict):
        return
    children: dict[Any, gym.Space[Any]] = dict(space.spaces)
    for name, child in children.items():
        if not isinstance(name, str):
            where = f" below {'.'.join(path)!r}" if path else ""
            raise EnvError(
                f"the {what} space has the key {name!r}{where}, which is not a string, as keys of "
                f"TorchRL's batches have to be: rename it with "
                f"gymnasium.wrappers.Transform{what.capitalize()}"
            )
        check_keys(what, child, (*path, name))


def dict_levels(
    space: gym.Space[Any], path: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], frozenset[str]]]:
    """The Dict spaces within a space, itself included: path and keys of each."""
    if not isinstance(space, gym.spaces.Dict):
        return []
    levels = [(path, frozenset(space.spaces))]
    for name, child in space.spaces.items():
        levels += dict_levels(child, (*path, name))
    return levels


def lacking(field: Field) -> InvalidValueError:
    """What to raise where an observation hasn't an entry that its space has."""
    return InvalidValueError(
        f"the environment returned an observation without {'.'.join(field.key)!r}, which its "
        "observation space has"
    )


def another_shape(value: Array, field: Field, *lead: int) -> InvalidValueError:
    """What to raise where an observation isn't of the shape that its space says.

    Args:
        value: of the field.
        lead: k, where they are the observations of a batch.
    """
    return InvalidValueError(
        f"the environment returned {'.'.join(field.key)!r} of shape {value.shape}; its observation "
        f"space says {(*lead, *field.shape)}"
    )


def not_a_number(value: Array, field: Field) -> InvalidValueError:
    """What to raise where an observation is NaN somewhere."""
    return InvalidValueError(
        f"the environment returned NaN in {'.'.join(field.key)!r}, at "
        f"{np.argwhere(np.isnan(value))[:5].tolist()} of shape {value.shape}. If NaN is meant to "
        "say something, replace it with a gymnasium.ObservationWrapper, or with a "
        "gymnasium.vector.VectorObservationWrapper"
    )


def unknown_key(
    found: Mapping[Any, Any], known: Collection[str], path: tuple[str, ...], *lead: int
) -> InvalidValueError:
    """The error of an observation with a key that its space doesn't have.

    Args:
        found: the dict that has it.
        known: keys that its space has.
        path: where the dict lies in the observation.
        lead: k, where they are the observations of a batch.
    """
    unknown = next(name for name in found if name not in known)
    wrappers = "gymnasium.wrappers.vector" if lead else "gymnasium.wrappers"
    remedy = f"FilterObservation(env, {sorted(known)})"
    if path or not known:  # which FilterObservation doesn't reach
        remedy = "TransformObservation"
    return InvalidValueError(
        f"the environment returned an observation with {unknown!r}"
        f"{f' below {named(path)}' if path else ''}, which its observation space "
        "does not have, so that a batch would lack it: add it to the space, or take it out with "
        f"{wrappers}.{remedy}"
    )


def unsupported_observation(key: Key, space: gym.Space[Any], whole: gym.Space[Any]) -> TypeError:
    """The error of a space whose values are no arrays of a fixed shape.

    Args:
        key: of the observation.
        space: its space.
        whole: the observation space in which it lies.
    """
    spaces = gym.spaces
    parts = whole.spaces.items() if _is_dict(whole) else ()
    others = [name for name, part in parts if _is_supported(part)]
    if isinstance(space, spaces.Tuple | spaces.OneOf) and (flat := _flattened(whole)) is not None:
        flattened = "gymnasium.wrappers.FlattenObservation(env)"
        if flat.dtype != np.float32:  # which networks take
            flattened = f"gymnasium.wrappers.DtypeObservation({flattened}, numpy.float32)"
        advice = f"Flatten it with {flattened}"
    elif others and len(key) == 1:
        advice = f"Leave it out with gymnasium.wrappers.FilterObservation(env, {others})"
    else:
        advice = "Make an array of it with gymnasium.wrappers.TransformObservation"
    return TypeError(
        f"the observation {'.'.join(key)!r} is a {type(space).__name__} space; supported are "
        f"Box, Discrete, MultiDiscrete, MultiBinary and Dicts of them. {advice}"
    )


def _is_supported(space: gym.Space[Any]) -> bool:
    if _is_dict(space):
        return all(map(_is_supported, space.spaces.values()))
    return has_arrays(space)


def has_arrays(space: gym.Space[Any]) -> bool:
    """Whether the values of a space are arrays of a fixed shape and data type."""
    return isinstance(space, ARRAY_SPACES) and space.shape is not None and space.dtype is not None


def _is_dict(space: gym.Space[Any]) -> TypeGuard[gym.spaces.Dict]:
    return isinstance(space, gym.spaces.Dict)


def _flattened(space: gym.Space[Any]) -> gym.spaces.Box | None:
    """What FlattenObservation makes of a space; None if that isn't one array."""
    try:
        flat = gym.spaces.flatten_space(space)
    except NotImplementedError:
        return None
    return flat if isinstance(flat, gym.spaces.Box) else None
