"""What the Atari recipes share beside `support.pixels`: options and environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import gymnasium as gym

from support.options import option
from torchrl_hts.envs import make_atari

__all__ = ["VIDEO_FPS", "AtariOptions", "eval_env", "train_env"]

VIDEO_FPS = 15  # of steps, each of 4 frames at 60 a second


@dataclass(frozen=True)
class AtariOptions:
    """Options of the game.

    To be mixed in before those of an algorithm, and without a base: a dataclass takes over all
    fields that a base has, inherited ones included, and the defaults of `PixelOptions` would come
    before the algorithm's own.
    """

    env_id: str = option("ALE/Pong-v5", "id of ale-py: ALE/ and the game's name")
    total_frames: int = option(
        10_000_000, "environment steps in all, of 4 emulator frames each", least=1
    )
    terminal_on_life_loss: bool = option(
        False, "end training's episodes with each life; their returns are then per life"
    )
    sticky_actions: bool = option(False, "repeat the last action with probability 0.25")


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
