"""A TorchRL environment in the place of a factory, as `Collector` takes one: it is copied."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.common import _EnvWrapper

from torchrl_hts._executor.factories import Copied
from torchrl_hts._processes.messages import pickled

__all__ = ["copier"]


def copier(env: EnvBase, name: str) -> Callable[[], Any]:
    """A factory that makes copies of an environment as it is now; itself it is left alone.

    Args:
        env: no `SerialEnv` or `ParallelEnv`.
        name: of the argument, for messages.

    Raises:
        TypeError: if it can't be copied.
        ValueError: if it is closed.
    """
    kind = type(env).__name__
    if _is_closed(env):
        raise ValueError(f"{name} is a {kind} that is closed: give one that is not")
    if normalising := _with_statistics(env):
        warnings.warn(
            f"the statistics of the {normalising} in {name} are counted by the copy that is "
            "stepped: yours keeps the values that it has. Normalise in the policy with "
            "torchrl_hts.RunningNorm to have them",
            stacklevel=7,  # whoever makes the collector
        )
    try:
        return Copied(pickled(env))
    except Exception as error:
        raise TypeError(
            f"{name} is a {kind} that can't be copied for the process that steps it ({error}): "
            "give a callable that makes one, such as lambda: make_env()"
        ) from error


def _is_closed(env: EnvBase) -> bool:
    """Whether it was closed. Only of wrappers can it be told: others are closed from the start."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return isinstance(env, _EnvWrapper) and bool(env.is_closed)


def _with_statistics(env: EnvBase) -> str | None:
    """The first transform of an environment that normalises by statistics of its own, by name."""
    while isinstance(env, TransformedEnv):
        for part in env.transform.modules():
            if type(part).__name__.startswith("VecNorm") and not getattr(part, "frozen", False):
                return type(part).__name__
        env = env.base_env
    return None
