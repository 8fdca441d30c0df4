"""Gymnasium environments ready to train on. Nothing here imports torch."""

from __future__ import annotations

from torchrl_hts.envs.atari import EpisodicLife, FireOnReset, make_atari
from torchrl_hts.envs.football import FootballEnv, make_football

__all__ = ["EpisodicLife", "FireOnReset", "FootballEnv", "make_atari", "make_football"]
