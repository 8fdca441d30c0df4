"""What a TorchRL environment is made up of: transforms, environments in it, another library's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv
from torchrl.envs import AutoResetEnv, EnvBase, SerialEnv, TransformedEnv

from torchrl_hts._executor.made_once import gymnasium_parts
from torchrl_hts._executor.vector_engine import autoreset_mode
from torchrl_hts.errors import EnvError

__all__ = [
    "base_of",
    "check_autoreset",
    "gymnasium_within",
    "name_of",
    "singles_within",
    "torchrl_parts",
    "transforms_with_statistics",
]


def singles_within(env: EnvBase) -> Iterator[EnvBase]:
    """The environments that are seeded: those of a SerialEnv, as if each were alone, or itself."""
    base = base_of(env)
    if isinstance(base, SerialEnv):
        if base.is_closed:
            base.start()
        yield from base._envs
    else:
        yield env


def gymnasium_within(env: EnvBase) -> gym.Env[Any, Any] | None:
    """The gymnasium environment that ``GymWrapper`` and its transforms are around, if any."""
    within = _wrapped_by(env)
    return within if isinstance(within, gym.Env) else None


def torchrl_parts(env: EnvBase) -> Iterator[Any]:
    """What is below the transforms of an environment or a batch, and of those in it at hand."""
    base = base_of(env)
    yield base
    for single in singles_within(env):
        if single is not env:
            yield from torchrl_parts(single)
    within = _wrapped_by(env)
    if isinstance(within, gym.Env | VectorEnv):
        yield from gymnasium_parts(within)


def check_autoreset(env: EnvBase) -> None:
    """Refuse what TorchRL doesn't reset itself: a ``VectorEnv``, or with ``auto_reset=True``.

    In ``NEXT_STEP`` the last observation is lost, and a row is wasted on the reset. In
    ``SAME_STEP`` what a transform truncates goes on, and an environment that reuses its array
    overwrites its last observation. TorchRL's ``auto_reset`` puts NaN in its place.
    """
    if any(isinstance(layer, AutoResetEnv) for layer in _layers(env)):
        raise EnvError(
            f"{name_of(env)} is made with auto_reset=True (AutoResetEnv), by which the last "
            "observation of an episode is lost: make it without auto_reset=True, and let it step "
            "to the end of an episode and no further. The collector resets it"
        )
    batch = _wrapped_by(env)
    if not isinstance(batch, VectorEnv):
        return
    mode = autoreset_mode(batch)
    if mode != AutoresetMode.DISABLED:
        raise EnvError(
            f"{name_of(env)} is around a {type(batch).__name__} in {mode}, in which TorchRL loses "
            "the end of an episode. Let create_env_fn make the gymnasium.vector.VectorEnv itself, "
            "without TorchRL's wrapper. Or wrap one that is made with "
            "autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED"
        )


def name_of(env: EnvBase) -> str:
    """The name of its class, below its transforms."""
    return type(base_of(env)).__name__


def transforms_with_statistics(env: EnvBase) -> list[str]:
    """The transforms that normalise with running statistics of their own, by name."""
    return [
        type(part).__name__
        for layer in _layers(env)
        if isinstance(layer, TransformedEnv)
        for part in layer.transform.modules()
        if type(part).__name__.startswith("VecNorm") and not getattr(part, "frozen", False)
    ]


def _wrapped_by(env: EnvBase) -> Any:
    """What a wrapper of another library is around, below its transforms; None if it is none."""
    return getattr(base_of(env), "_env", None)


def base_of(env: EnvBase) -> EnvBase:
    """What is below its transforms."""
    *_, base = _layers(env)
    return base


def _layers(env: EnvBase) -> Iterator[EnvBase]:
    while isinstance(env, TransformedEnv):
        yield env
        env = env.base_env
    yield env
