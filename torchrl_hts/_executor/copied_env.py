"""Copies of a TorchRL environment, each of which draws for itself."""

from __future__ import annotations

import pickle
import random
from typing import Any

import cloudpickle
import numpy as np
import torch
from torchrl.envs import EnvBase

from torchrl_hts._executor.own_seeds import drawn_seed
from torchrl_hts._processes.messages import pickled

__all__ = ["Copied"]


class Copied:
    """Makes a copy of a TorchRL environment at each call, as it was when this was made.

    Generators that it holds, however deep, begin from what ``np.random`` gives, as those do that
    its constructor makes: each copy draws for itself, by the collector's seed.

    Args:
        env: to be copied.

    Raises:
        Exception: of any kind, if it can't be pickled.
    """

    def __init__(self, env: EnvBase) -> None:
        self._content = pickled(env, _WithoutGenerators)

    def __call__(self) -> EnvBase:
        env: EnvBase = pickle.loads(self._content)
        return env


class _WithoutGenerators(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Leaves of a generator nothing but its kind."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.random.BitGenerator):
            return _begun, (type(value),)
        if isinstance(value, np.random.SeedSequence):
            return _begun, (np.random.SeedSequence,)
        if isinstance(value, np.random.Generator):
            return np.random.Generator, (value.bit_generator,)  # which others may hold too
        if isinstance(value, np.random.RandomState):
            return np.random.RandomState, (value._bit_generator,)
        if isinstance(value, random.Random):
            return _pythons, (type(value), vars(value))
        if isinstance(value, torch.Generator):
            return _torchs, (str(value.device),)
        return super().reducer_override(value)


def _begun(kind: Any) -> Any:
    """What begins from a seed."""
    return kind(drawn_seed())


def _pythons(kind: type[random.Random], attributes: dict[str, Any]) -> random.Random:
    generator = kind.__new__(kind)
    vars(generator).update(attributes)
    generator.seed(drawn_seed())
    return generator


def _torchs(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(drawn_seed())
