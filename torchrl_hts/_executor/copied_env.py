"""Copies of a TorchRL environment, each of which draws for itself."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torchrl.envs import EnvBase

from torchrl_hts._executor.own_seeds import drawn_seed
from torchrl_hts._executor.torchrl_layers import wrapped_by

__all__ = ["Copied"]


class Copied:
    """Makes a copy of a TorchRL environment at each call.

    Generators that it holds begin from what ``np.random`` gives, as those do that its constructor
    makes: each copy draws for itself, by the collector's seed.

    Args:
        content: the environment, pickled.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __call__(self) -> EnvBase:
        env: EnvBase = pickle.loads(self.content)
        for layer in _layers(env):
            _reseed(layer)
        return env


def _layers(env: EnvBase) -> Iterator[Any]:
    """An environment, its transforms, what these are around, and the wrappers within."""
    yield from env.modules()
    within = wrapped_by(env)
    while within is not None:
        yield within
        within = within.env if isinstance(within, gym.Wrapper) else None


def _reseed(layer: Any) -> None:
    """Seed the generators that an object holds."""
    for name, value in getattr(layer, "__dict__", {}).items():
        if isinstance(value, np.random.Generator):
            setattr(layer, name, np.random.default_rng(drawn_seed()))
        elif isinstance(value, np.random.RandomState | random.Random):
            value.seed(drawn_seed())
        elif isinstance(value, torch.Generator):
            value.manual_seed(drawn_seed())
