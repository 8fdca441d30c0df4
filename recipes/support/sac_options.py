"""Options of SAC on continuous control. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from support.continuous import make_bounded
from support.errors import RecipeError
from support.options import option
from support.required_return import ReturnOptions

__all__ = ["SACOptions"]


@dataclass(frozen=True)
class SACOptions(ReturnOptions):
    """Options of SAC; the defaults are those of the literature (CleanRL), on 4 environments."""

    env_id: str = option("HalfCheetah-v5", "gymnasium id; bounded Box actions (extra 'mujoco')")
    total_frames: int = option(1_000_000, "environment steps in all", least=1)
    num_envs: int = option(4, "environments", least=1, most=2048)
    sync_interval: int = option(8, "steps per environment and round (alpha)", least=1)
    lag: int = option(
        1, "updates that the behaviour parameters are behind; 0 is synchronous", least=0
    )
    num_actors: int | None = option(
        None, "processes that run the policy; by default as many as pay", may_change=True, least=1
    )
    init_random_frames: int = option(
        5_000, "steps with random actions at first, without learning", least=0
    )
    buffer_size: int = option(1_000_000, "newest steps that are learned from", least=1)
    batch_size: int = option(256, "steps per optimizer step", least=1, most=2**20)
    utd_ratio: float = option(
        1.0,
        "optimizer steps per environment step; those of a round are rounded to a whole number",
        least=0,
        most=1024,
    )
    learning_rate: float = option(3e-4, "of the policy, for Adam", least=0)
    critic_learning_rate: float = option(1e-3, "of the Q functions, and of alpha", least=0)
    gamma: float = option(0.99, "discount", least=0, most=1)
    tau: float = option(0.005, "share of the Q functions that their targets take", least=0, most=1)
    alpha: float | None = option(
        None,
        "weight of the entropy; by default it is learned, so that the entropy becomes the negative "
        "number of action dimensions",
        least=1e-9,
    )
    hidden_units: int = option(256, "width of the hidden layers", least=1, most=16384)
    eval_interval: int = option(50_000, "steps between two evaluations; 0: none at all", least=0)
    eval_episodes: int = option(10, "episodes of each evaluation", least=1)

    @property
    def frames_per_batch(self) -> int:
        """Environment steps of a round."""
        return self.num_envs * self.sync_interval

    @property
    def num_rounds(self) -> int:
        """Rounds in all."""
        return -(-self.total_frames // self.frames_per_batch)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps of a round."""
        return round(self.utd_ratio * self.frames_per_batch)

    def check_task(self) -> None:
        """Find out whether there is such a task, with bounded actions."""
        make_bounded(self.env_id).close()

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        super().__post_init__()
        frames = self.frames_per_batch
        if not self.updates_per_batch:
            raise RecipeError(
                f"--utd-ratio {self.utd_ratio:g} makes no optimizer step of a round of {frames} "
                f"steps: give at least {1 / frames:g}"
            )
        if self.init_random_frames > self.total_frames:
            raise RecipeError(
                f"--init-random-frames {self.init_random_frames} leaves nothing of --total-frames "
                f"{self.total_frames} to learn from: give less"
            )

    def check_parts(self, parts: int | None) -> None:
        """Refuse what parts of a batch, each with a buffer, can't have equally, or can't hold."""
        super().check_parts(parts)
        of = "learners" if self.shards is None else "shards"
        for flag, number in (
            ("--batch-size", self.batch_size),
            ("--buffer-size", self.buffer_size),
        ):
            if number % (parts or 1):
                raise RecipeError(
                    f"{flag} {number} steps can't be shared out equally among {parts} {of}: give a "
                    f"multiple of {parts}"
                )
        if self.buffer_size < self.frames_per_batch:
            raise RecipeError(
                f"--buffer-size {self.buffer_size} can't hold the {self.frames_per_batch} steps of "
                "a round: give more"
            )
