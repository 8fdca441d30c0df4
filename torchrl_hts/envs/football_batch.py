"""Several games of football in one pool of EnvPool, which step as one. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from torchrl_hts._executor.background_env import BackgroundEnv
from torchrl_hts.envs.football import make_football
from torchrl_hts.errors.checks import check_integer

__all__ = ["make_football_batch"]


class FootballBatch(SyncVectorEnv[Any, Any]):
    """Games that one pool plays; see `make_football_batch`, which makes it.

    Args:
        make_env: makes a game.
        num_envs: how many there are.
    """

    envs: list[BackgroundEnv]  # type: ignore[assignment]

    def __init__(self, make_env: partial[gym.Env[Any, Any]], num_envs: int) -> None:
        super().__init__([make_env] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self._is_seeded = False

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes: those of seeds, or the next of all games, or of some.

        Args:
            seed: of each game; of one number, game i gets that and i.
            options: ``"reset_mask"``, bool ``[k]``, says which games begin anew.
        """
        if seed is None and not self._is_seeded:
            seed = np.random.SeedSequence().generate_state(self.num_envs).tolist()
        if isinstance(seed, int):
            seed = [seed + index for index in range(self.num_envs)]
        if seed is not None:
            self._is_seeded = True
            for env, each in zip(self.envs, seed, strict=False):
                if each is not None:
                    env.begin_reset(each)
            seed = list(seed)
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """A tenth of a second of each game; those that end are at their next episode then."""
        for env, action in zip(self.envs, actions, strict=True):
            env.begin_step(action)
        return super().step(actions)


def make_football_batch(
    scenario: str = "academy_empty_goal_close",
    num_envs: int = 8,
    *,
    rewards: Literal["scoring", "scoring,checkpoints"] = "scoring,checkpoints",
    stacked: bool = True,
) -> VectorEnv[Any, Any, Any]:
    """Builds a batch of games of football that step as one, in one pool of EnvPool.

    Each is what ``make_football(scenario, engine="envpool")`` makes. Observations, rewards, ends
    and ``info`` are the same bits for the same seeds and actions. One thread plays the pool, so
    give `HTSCollector` a batch for each core. Games can't be saved: where a run is resumed they
    begin new episodes.

    Single games share a pool too, that of their executor (docs/results/football.md). Whether a
    batch is faster was not measured.

    Args:
        scenario: one of gfootball's, such as ``"academy_3_vs_1_with_keeper"``.
        num_envs: games, k. Observations of all are uint8 ``[k, 16, 72, 96]``.
        rewards: with ``"checkpoints"``, ten times 0.1 for bringing the ball to the goal.
        stacked: observations hold the last four moments.

    Raises:
        ModuleNotFoundError: EnvPool is not installed.
        TypeError, ValueError: there is no such scenario, or not one game at least.

    >>> envs = make_football_batch("academy_empty_goal_close", num_envs=2)
    >>> observations, infos = envs.reset(seed=0)
    >>> observations.shape, observations.dtype
    ((2, 16, 72, 96), dtype('uint8'))
    >>> envs.close()
    """
    num_envs = check_integer("num_envs", num_envs)
    make_env = partial(make_football, scenario, engine="envpool", rewards=rewards, stacked=stacked)
    return FootballBatch(make_env, num_envs)
