"""A TorchRL environment in the place of a factory, as `Collector` takes one: it is copied."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torchrl.envs import EnvBase
from torchrl.envs.common import _EnvWrapper

from torchrl_hts._executor.copied_env import Copied
from torchrl_hts._executor.torchrl_layers import base_of, transforms_with_statistics

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
    if normalising := transforms_with_statistics(env):
        warnings.warn(
            f"the statistics of the {normalising[0]} in {name} are counted by the copy that is "
            "stepped: yours keeps the values that it has. Normalise in the policy with "
            "torchrl_hts.RunningNorm to have them",
            stacklevel=7,  # whoever makes the collector
        )
    try:
        return Copied(env)
    except Exception as error:
        raise TypeError(
            f"{name} is a {kind} that can't be copied for the process that steps it ({error}): "
            "give a callable that makes one, such as lambda: make_env()"
        ) from error


def _is_closed(env: EnvBase) -> bool:
    """Whether it was closed. Only of wrappers can it be told: others are closed from the start."""
    base = base_of(env)
    return isinstance(base, _EnvWrapper) and bool(base.is_closed)
