"""Options of multi-agent PPO on VMAS. Nothing here imports torch, but to look for a scenario."""

from __future__ import annotations

import importlib.util
import traceback
import warnings
from dataclasses import dataclass

from support.errors import RecipeError
from support.options import RunOptions, option

__all__ = ["VmasOptions"]


@dataclass(frozen=True)
class VmasOptions(RunOptions):
    """Options of multi-agent PPO; the defaults are those of TorchRL's tutorial."""

    scenario: str = option("navigation", "what is played, as VMAS names it")
    num_agents: int = option(3, "agents of each environment", least=1, most=1024)
    max_steps: int = option(100, "steps of an episode", least=1)
    total_frames: int = option(300_000, "environment steps in all, of all agents at once", least=1)
    num_envs: int = option(60, "environments", least=1, most=65_535)
    num_batches: int = option(
        4, "simulations that share the environments out, each stepped as a whole", least=1
    )
    sync_interval: int = option(100, "steps per environment and round (alpha)", least=1)
    lag: int = option(
        1, "updates that the behaviour parameters are behind; 0 is synchronous", least=0
    )
    num_actors: int | None = option(
        None, "processes that run the policy; by default as many as pay", may_change=True, least=1
    )
    epochs: int = option(30, "passes over each batch", least=1)
    minibatch_size: int = option(400, "environment steps per optimizer step", least=1)
    learning_rate: float = option(3e-4, "of Adam", least=0)
    gamma: float = option(0.9, "discount", least=0, most=1)
    gae_lambda: float = option(0.9, "lambda of the advantage estimator", least=0, most=1)
    clip_epsilon: float = option(0.2, "how far PPO's ratio may move from 1", least=0, most=1)
    entropy_coefficient: float = option(1e-4, "weight of the entropy bonus", least=0)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm", least=0)
    hidden_units: int = option(
        256, "width of the two hidden layers of each network", least=1, most=16384
    )
    log_interval: int = option(6_000, "steps between two rows of metrics", least=1)
    eval_interval: int = option(60_000, "steps between two evaluations; 0: none at all", least=0)
    eval_episodes: int = option(20, "episodes of each evaluation", least=1)

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        super().__post_init__()
        if self.num_envs % self.num_batches:
            raise RecipeError(
                f"--num-envs {self.num_envs} must be a multiple of --num-batches "
                f"{self.num_batches}, which share them out equally"
            )

    def check_parts(self, parts: int | None) -> None:
        """Refuse what parts of a batch can't have equally; simulations stay whole."""
        if parts is not None and self.num_batches % parts:
            of = "learners" if self.shards is None else "shards"
            raise RecipeError(
                f"--num-batches {self.num_batches} simulations can't be shared out equally among "
                f"{parts} {of}: give a multiple of {parts}"
            )
        super().check_parts(parts)

    @property
    def task(self) -> str:
        """What is learned."""
        return self.scenario

    def check_task(self) -> None:
        """Find out whether there is such a scenario."""
        if importlib.util.find_spec("vmas") is None:
            raise RecipeError("this needs the package vmas: pip install 'torchrl_hts[vmas]'")
        with warnings.catch_warnings():  # gym, which VMAS imports, has all deprecations shown
            from torchrl.envs.libs.vmas import VmasEnv

            known = sorted(VmasEnv.available_envs)
        if self.scenario not in known:
            raise RecipeError(f"VMAS has no scenario {self.scenario}; it has {', '.join(known)}")

    def check_start(self) -> None:
        """Find out whether VMAS makes it with so many agents; a run that is there may have others.

        Raises:
            RecipeError: if it doesn't.
        """
        super().check_start()
        if self.resume is not None:
            return
        from support.vmas_batches import batches_of

        try:
            count = batches_of(self)(num_envs=1).n_agents
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise RecipeError(
                f"VMAS can't make {self.scenario} with --num-agents {self.num_agents} "
                f"({type(error).__name__} at {place.line!r}, {place.filename}, line "
                f"{place.lineno}): give another number"
            ) from error
        if count != self.num_agents:
            raise RecipeError(
                f"the number of agents in {self.scenario} is {count}, and --num-agents is "
                f"{self.num_agents}: give --num-agents {count}"
            )
