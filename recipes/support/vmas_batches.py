"""Batches of VMAS's environments, for training, for evaluations and for films."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

from torchrl.envs import MarlGroupMapType
from torchrl.envs.libs.vmas import VmasEnv

from support.vmas_options import VmasOptions

__all__ = ["VIDEO_FPS", "batches_of"]

VIDEO_FPS = 10.0  # as in real time: a step of VMAS is a tenth of a second


def batches_of(options: VmasOptions) -> Callable[..., VmasEnv]:
    """How the batches of a run are made; also with another ``num_envs``."""
    return partial(
        _make,
        options.scenario,
        num_envs=options.num_envs // options.num_batches,
        max_steps=options.max_steps,
        n_agents=options.num_agents,
    )


def _make(scenario: str, render_mode: str | None = None, **settings: int) -> VmasEnv:
    """One batch, with one group "agents" of all; VMAS is told how to render when it does."""
    # Of each worker, and nothing that anybody could mend: VMAS has no seeds of single environments.
    warnings.filterwarnings("ignore", "VmasEnv takes one seed for all of its environments")
    return VmasEnv(scenario, group_map=MarlGroupMapType.ALL_IN_ONE_GROUP, **settings)
