"""Options of the recipes that learn from vectors. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from support.options import RunOptions, option
from support.required_return import ReturnOptions

__all__ = ["CartPoleOptions", "RecurrentOptions", "VectorPPOOptions"]


@dataclass(frozen=True)
class VectorPPOOptions(RunOptions):
    """Options of PPO on vectors."""

    env_id: str = option("CartPole-v1", "gymnasium id; Box observations, Discrete actions")
    total_frames: int = option(200_000, "environment steps in all", least=1)
    num_envs: int = option(16, "environments", least=1, most=2048)
    sync_interval: int = option(32, "steps per environment and round (alpha)", least=1)
    lag: int = option(
        1, "updates that the behaviour parameters are behind; 0 is synchronous", least=0
    )
    num_actors: int | None = option(
        None, "processes that run the policy; by default as many as pay", may_change=True, least=1
    )
    epochs: int = option(8, "passes over each batch", least=1)
    minibatch_size: int = option(256, "steps per optimizer step", least=1)
    learning_rate: float = option(1e-3, "of Adam; decays linearly to 0", least=0)
    gamma: float = option(0.98, "discount", least=0, most=1)
    gae_lambda: float = option(0.8, "lambda of the advantage estimator", least=0, most=1)
    clip_epsilon: float = option(0.2, "how far PPO's ratio may move from 1", least=0, most=1)
    entropy_coefficient: float = option(0.0, "weight of the entropy bonus", least=0)
    max_grad_norm: float = option(0.5, "gradients are clipped to this norm", least=0)
    hidden_units: int = option(64, "width of the hidden layers", least=1, most=16384)
    eval_interval: int = option(20_000, "steps between two evaluations; 0: none at all", least=0)
    eval_episodes: int = option(20, "episodes of each evaluation", least=1)


@dataclass(frozen=True)
class CartPoleOptions(VectorPPOOptions, ReturnOptions):
    """Options whose defaults solve CartPole-v1 with each seed that was tried."""


@dataclass(frozen=True)
class RecurrentOptions(VectorPPOOptions):
    """What the agent sees, and whether it remembers it."""

    whole_rows: ClassVar[bool] = True  # a sequence that is cut has no memory
    hide: str = option("1,3", "entries of observations that are hidden; CartPole's velocities")
    memory: bool = option(True, "a GRU; without, a layer that sees the present step alone")
