"""Gymnasium environments ready to train on. Nothing here imports torch."""

from __future__ import annotations

from torchrl_hts.envs.atari import EpisodicLife, FireOnReset, make_atari

__all__ = ["EpisodicLife", "FireOnReset", "make_atari"]
