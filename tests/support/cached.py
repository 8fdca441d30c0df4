"""Factories that make one environment, and give it again at each further call in a process."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import gymnasium as gym
from environments import EchoEnv
from gymnasium.vector import SyncVectorEnv
from torchrl.envs import GymWrapper, SerialEnv, StepCounter, TransformedEnv

__all__ = ["CACHED", "batch_of_one_twice", "cached"]


@lru_cache
def cached() -> Any:
    """One of gymnasium's."""
    return EchoEnv()


def wrapped() -> Any:
    """In another wrapper each time."""
    return gym.wrappers.TimeLimit(cached(), 5)


def batch_of_one_twice() -> Any:
    """Both of whose places hold the same."""
    return SyncVectorEnv([cached] * 2)


@lru_cache
def batch() -> Any:
    """Of two that are cached with it."""
    return SyncVectorEnv([EchoEnv] * 2)


def in_torchrl() -> Any:
    """In another of TorchRL's wrappers each time."""
    return TransformedEnv(GymWrapper(cached()), StepCounter())


@lru_cache
def _one() -> Any:
    return GymWrapper(EchoEnv())


def of_torchrl() -> Any:
    """Below other transforms each time."""
    return TransformedEnv(_one(), StepCounter())


def serial() -> Any:
    """In another batch each time."""
    return TransformedEnv(SerialEnv(1, partial(_one)), StepCounter())


CACHED = [cached, wrapped, batch, in_torchrl, of_torchrl, serial]
