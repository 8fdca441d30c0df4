"""Environment factories with something around them; runs in executors, and so without torch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from torchrl_hts._rounds.keys import as_path

__all__ = ["WithTransforms", "initialised", "with_transforms"]

_called: set[int] = set()  # collectors whose init_fn has been called in this process


class _AfterInit:
    """Calls a function before the first environment of a process is made."""

    def __init__(self, factory: Callable[[], Any], init_fn: Callable[[], Any], mark: int) -> None:
        self.factory, self.init_fn, self.mark = factory, init_fn, mark

    def __call__(self) -> Any:
        if self.mark not in _called:
            self.init_fn()
            _called.add(self.mark)
        return self.factory()


def initialised(
    factories: Sequence[Callable[[], Any]], init_fn: Callable[[], Any]
) -> list[Callable[[], Any]]:
    """The factories, of which the first that a process calls calls `init_fn` before."""
    # Equal factories stay one object: each is pickled once.
    wrapped = {id(factory): _AfterInit(factory, init_fn, id(init_fn)) for factory in factories}
    return [wrapped[id(factory)] for factory in factories]


class WithTransforms:
    """Puts TorchRL's transforms around the environment that a factory makes.

    Args:
        factory: of a TorchRL environment; one of gymnasium's is left alone, and imports no torch.
        transforms: a pickled list of them.
        where_missing: leave out those whose keys the environment has already.
    """

    def __init__(
        self, factory: Callable[[], Any], transforms: bytes, *, where_missing: bool = False
    ) -> None:
        self.factory, self.transforms, self.where_missing = factory, transforms, where_missing

    def __call__(self) -> Any:
        env = self.factory()
        if isinstance(env, gym.Env):
            return env
        from torchrl.envs import TransformedEnv

        for transform in pickle.loads(self.transforms):
            if self.where_missing and _keys(transform) <= set(env.output_spec.keys(True, True)):
                continue
            env = TransformedEnv(env, transform, auto_unwrap=True)
        return env


def with_transforms(
    factories: Sequence[Callable[[], Any]], transforms: Sequence[Any]
) -> list[Callable[[], Any]]:
    """The factories, whose TorchRL environments get those transforms that they lack."""
    if not transforms:
        return list(factories)
    sent = pickle.dumps(list(transforms))
    wrapped = {id(f): WithTransforms(f, sent, where_missing=True) for f in factories}
    return [wrapped[id(factory)] for factory in factories]


def _keys(transform: Any) -> set[Any]:
    """Of the observations that a primer or an ``InitTracker`` adds."""
    primers = getattr(transform, "primers", None)
    names = [transform.init_key] if primers is None else list(primers.keys(True, True))
    return {("full_observation_spec", *as_path(name)) for name in names}
