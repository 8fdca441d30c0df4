"""Collectors that tests start, and how their workers have ended."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from environments import EchoEnv
from policies import categorical
from probe import workers
from tensordict import TensorDict
from torch import nn

from torchrl_hts import HTSCollector

ENDLESS = partial(EchoEnv, (10**9,))
_started: WeakSet[HTSCollector] = WeakSet()


def end_all() -> None:
    """So that a failing test doesn't make those after it fail."""
    for collector in list(_started):
        collector.shutdown(timeout=0)


def start(envs: list[Any], policy: nn.Module | None = None, **kwargs: Any) -> HTSCollector:
    """A collector of rounds of 4 steps."""
    kwargs = {"frames_per_batch": 4 * len(envs), "seed": 0} | kwargs
    collector = HTSCollector(envs, policy or categorical(), **kwargs)
    _started.add(collector)
    return collector


def collect(envs: list[Any], policy: nn.Module, rounds: int = 3, **kwargs: Any) -> TensorDict:
    """Some rounds of 4 steps, as one ``[N, T]`` batch."""
    frames = len(envs) * 4
    kwargs = {"frames_per_batch": frames, "total_frames": rounds * frames, "seed": 0} | kwargs
    with HTSCollector(envs, policy, **kwargs) as collector:
        return torch.cat(list(collector), dim=1)


def one_batch(env: Any, policy: nn.Module | None = None, **kwargs: Any) -> TensorDict:
    """The only batch, of 12 frames, as it is handed out."""
    kwargs = {"frames_per_batch": 12, "total_frames": 12, "seed": 0} | kwargs
    with HTSCollector(env, policy, **kwargs) as collector:
        (batch,) = collector
    return batch


def exit_statuses(collector: HTSCollector) -> dict[str, int | None]:
    """How each worker has ended: 0 unless it failed, or had to be killed."""
    return {worker.name: worker.exit_status(0) for worker in workers(collector).processes}


def assert_others_ended_by_themselves(collector: HTSCollector, *failed: str) -> None:
    statuses = exit_statuses(collector)
    assert {status for name, status in statuses.items() if name not in failed} == {0}, statuses
