"""What the Atari recipes share beside `support.pixels`: environments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import gymnasium as gym

from support.pixel_options import AtariOptions
from torchrl_hts.envs import make_atari

__all__ = ["VIDEO_FPS", "eval_env", "train_env"]

VIDEO_FPS = 15  # of steps, each of 4 frames at 60 a second


def train_env(options: AtariOptions) -> Callable[..., gym.Env]:
    """Makes the game to train on."""
    return partial(
        make_atari,
        options.env_id,
        terminal_on_life_loss=options.terminal_on_life_loss,
        sticky_actions=options.sticky_actions,
    )


def eval_env(options: AtariOptions) -> Callable[..., gym.Env]:
    """Makes the game to evaluate on: from its start to its end, whatever training calls one."""
    return partial(make_atari, options.env_id, sticky_actions=options.sticky_actions)
