"""Options of PPO on continuous control. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from support.continuous import make_continuous
from support.options import option
from support.vector_options import VectorPPOOptions

__all__ = ["ContinuousOptions"]


@dataclass(frozen=True)
class ContinuousOptions(VectorPPOOptions):
    """Options of PPO; the defaults are those of the literature (CleanRL), on 8 environments."""

    env_id: str = option("HalfCheetah-v5", "gymnasium id; Box actions (extra 'mujoco')")
    total_frames: int = option(1_000_000, "environment steps in all", least=1)
    num_envs: int = option(8, "environments", least=1, most=2048)
    sync_interval: int = option(256, "steps per environment and round (alpha)", least=1)
    epochs: int = option(10, "passes over each batch", least=1)
    minibatch_size: int = option(64, "steps per optimizer step", least=1)
    learning_rate: float = option(3e-4, "of Adam; decays linearly to 0", least=0)
    gamma: float = option(0.99, "discount", least=0, most=1)
    gae_lambda: float = option(0.95, "lambda of the advantage estimator", least=0, most=1)
    clip_epsilon: float = option(
        0.2, "how far PPO's ratio, and the value, may move", least=0, most=1
    )
    eval_interval: int = option(100_000, "steps between two evaluations; 0: none at all", least=0)
    eval_episodes: int = option(10, "episodes of each evaluation", least=1)

    def check_task(self) -> None:
        """Find out whether there is such a task, with continuous actions."""
        make_continuous(self.env_id).close()
