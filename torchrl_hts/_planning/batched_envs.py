"""TorchRL's `SerialEnv` and `ParallelEnv`, taken apart into the environments that they batch.

A collector steps single environments, each on its own. A batched environment whose factories are at
hand gives them; transforms around it are put around each of them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
from torchrl.envs import EnvBase, Transform, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_hts._executor.factories import WithTransforms
from torchrl_hts._planning.batch_transforms import around_one, around_one_of
from torchrl_hts._planning.pickling import parts

__all__ = ["factories_of"]

_DEPTH = 4  # how far into a factory is looked for what it makes
_NAMES = frozenset(("SerialEnv", "ParallelEnv"))


def factories_of(source: Any, kwargs: Mapping[str, Any]) -> list[Callable[[], Any]] | None:
    """The factories of a batched environment, with their keyword arguments; None for others.

    Args:
        source: a batched environment, with or without transforms around it, or a callable. One that
            speaks of `SerialEnv` or `ParallelEnv` is called once, here, to see what it makes.
        kwargs: of the callable, or of each environment that is batched.

    Raises:
        TypeError: for transforms that can't be put around each environment alone.
    """
    if isinstance(source, EnvBase):
        return _taken_apart(source, kwargs)
    if isinstance(source, gym.Env) or not _may_batch(source):
        return None
    made = source(**kwargs)
    try:
        return _taken_apart(made, {}) if isinstance(made, EnvBase) else None
    finally:
        if not getattr(made, "is_closed", False):
            made.close()


def _taken_apart(env: EnvBase, kwargs: Mapping[str, Any]) -> list[Callable[[], Any]] | None:
    if isinstance(env, TransformedEnv):
        inner = _taken_apart(env.base_env, kwargs)
        if inner is None:
            return None
        each = around_one_of(env, _batch_within(env))
        return [WithTransforms(*both) for both in zip(inner, each, strict=True)]
    if not isinstance(env, BatchedEnvBase):
        return None
    pairs = zip(env.create_env_fn, env.create_env_kwargs, strict=True)
    bound = [(factory, {**own, **kwargs}) for factory, own in pairs]
    return [partial(factory, **own) if own else factory for factory, own in bound]


def around_each(factory: Callable[[], Any], transform: Transform) -> WithTransforms:
    """A factory of one environment, with what is around all environments of a batch.

    Raises:
        TypeError: for transforms that can't be put around each environment alone.
    """
    return WithTransforms(factory, around_one(transform))


def _batch_within(env: EnvBase) -> BatchedEnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def _may_batch(factory: Any) -> bool:
    """Whether a factory, or what it calls, speaks of a batched environment."""
    level, seen = [factory], {id(factory)}
    for _ in range(_DEPTH):
        below = []
        for value in level:
            if isinstance(value, type):
                if issubclass(value, BatchedEnvBase):
                    return True
                continue
            if isinstance(value, types.FunctionType) and _names_of(value.__code__) & _NAMES:
                return True
            for _, part in parts(value, ""):
                if id(part) not in seen and not isinstance(part, types.ModuleType):
                    seen.add(id(part))
                    below.append(part)
        level = below
    return False


def _names_of(code: types.CodeType) -> set[str]:
    """The names that a function uses, and those of the functions in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return names
