"""Gymnasium environments ready to train on. Nothing here imports torch."""

from __future__ import annotations

from torchrl_hts.envs.atari import (
    EpisodicLife,
    FireOnReset,
    check_atari,
    make_atari,
    make_atari_batch,
)
from torchrl_hts.envs.football import FootballEnv, check_football, make_football
from torchrl_hts.envs.football_batch import make_football_batch
from torchrl_hts.envs.in_thread import make_in_thread
from torchrl_hts.envs.ray_cluster import reaching_ray
from torchrl_hts.envs.remote import make_remote

__all__ = [
    "EpisodicLife",
    "FireOnReset",
    "FootballEnv",
    "check_atari",
    "check_football",
    "make_atari",
    "make_atari_batch",
    "make_football",
    "make_football_batch",
    "make_in_thread",
    "make_remote",
    "reaching_ray",
]
