"""Options of the recipes that learn from pictures. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from support.options import RunOptions, option

__all__ = ["AtariOptions", "PPOOptions", "PixelOptions"]


@dataclass(frozen=True)
class PixelOptions(RunOptions):
    """Options of the recipes that learn from pictures."""

    num_envs: int = option(16, "games played at the same time", least=1, most=2048)
    sync_interval: int = option(5, "steps per game and round (alpha)", least=1)
    lag: int = option(
        1, "updates that the behaviour parameters are behind; 0 is synchronous", least=0
    )
    gradient_at: Literal["behaviour", "newest"] = option(
        "behaviour", "take gradients at the parameters that gathered the batch, or at the newest"
    )
    num_actors: int | None = option(
        None, "processes that run the policy; by default as many as pay", may_change=True, least=1
    )
    num_executors: int | None = option(
        None, "processes that step games; by default as many as pay", may_change=True, least=1
    )
    device: str = option("cpu", "where batches lie and are learned from, such as cuda")
    policy_device: str = option("cpu", "where the actors run the policy, such as cuda")
    gamma: float = option(0.99, "discount", least=0, most=1)
    entropy_coefficient: float = option(0.01, "weight of the entropy bonus", least=0)
    critic_coefficient: float = option(0.5, "weight of the value loss", least=0)
    max_grad_norm: float = option(0.5, "gradients are clipped to this norm", least=0)


@dataclass(frozen=True)
class PPOOptions(PixelOptions):
    """Options of PPO on pictures."""

    num_envs: int = option(8, "games played at the same time", least=1, most=2048)
    sync_interval: int = option(128, "steps per game and round (alpha)", least=1)
    learning_rate: float = option(2.5e-4, "of Adam; decays linearly to 0", least=0)
    gae_lambda: float = option(0.95, "lambda of the advantage estimator", least=0, most=1)
    epochs: int = option(3, "passes over each batch", least=1)
    minibatch_size: int = option(256, "steps per optimizer step", least=1)
    clip_epsilon: float = option(
        0.1, "how far PPO's ratio, and the value, may move; it doesn't decay", least=0, most=1
    )
    critic_coefficient: float = option(
        0.25,
        "weight of the value loss (the 0.5 of CleanRL is of half the squared error)",
        least=0,
    )


@dataclass(frozen=True)
class AtariOptions:
    """Options of the game.

    To be mixed in before those of an algorithm, and without a base. A dataclass takes over all
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

    def check_task(self) -> None:
        """Find out whether ale-py has such a game."""
        from torchrl_hts.envs import check_atari

        check_atari(self.env_id)
