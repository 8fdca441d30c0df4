"""Every recipe with as little as can be: 4 environments, and what else its options allow."""

from __future__ import annotations

import importlib
from typing import Any

import football_installed
import pytest
import script_paths  # noqa: F401  so that the recipes are found
from support.options import parse_options

_GAME = "--sync-interval 8 --eval-max-steps 30"
SMALL = {
    "a2c_atari": _GAME,
    "mappo": "--num-batches 2 --num-agents 2 --max-steps 6 --sync-interval 10 --minibatch-size 20 "
    "--epochs 1 --hidden-units 16",
    "ppo_atari": f"{_GAME} --minibatch-size 16 --epochs 2",
    "ppo_cartpole": "--sync-interval 16 --minibatch-size 32 --epochs 1",
    "ppo_football": f"{_GAME} --minibatch-size 16 --epochs 1",
    "ppo_mujoco": "--env-id Pendulum-v1 --sync-interval 16 --minibatch-size 32 --epochs 1",
    "ppo_recurrent": "--sync-interval 16 --minibatch-size 32 --epochs 2",
    "sac_mujoco": "--env-id Pendulum-v1 --sync-interval 16 --batch-size 16 --utd-ratio 0.05 "
    "--init-random-frames 64 --hidden-units 16",
}


def flags_of(recipe: str) -> str:
    """Options of a small run; skips the test if something is not installed that it needs."""
    if recipe.endswith("atari"):
        pytest.importorskip("ale_py")
    if recipe == "mappo":
        reason = "vmas is not installed: pip install 'torchrl_hts[vmas]'"
        pytest.importorskip("vmas", reason=reason)
    flags = f"{SMALL[recipe]} --num-envs 4"
    if recipe.endswith("football") and not football_installed.is_here("gfootball"):
        football_installed.need("envpool")
        flags += " --engine envpool"
    return flags


def options_of(recipe: str) -> Any:
    """The same, parsed."""
    return parse_options(importlib.import_module(recipe).Options, "", flags_of(recipe).split())


def is_saved(recipe: str) -> bool:
    """Whether checkpoints hold its environments, so that a resumed run is the whole one."""
    return "envpool" not in flags_of(recipe)
