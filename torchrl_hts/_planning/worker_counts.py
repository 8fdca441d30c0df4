"""Choosing how many executors and actors a collector has, by trying both kinds of work out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._planning.costs import PassCosts, StepCosts, TeamSize, team_for
from torchrl_hts._planning.pass_times import PassJob
from torchrl_hts._processes.fork_server import WorkerProcess
from torchrl_hts._processes.limits import most_executors
from torchrl_hts._processes.server_pool import Servers

__all__ = ["Description", "Tryout", "choose_team"]

Description = GymDescription | TorchRLDescription


@dataclass(frozen=True)
class Tryout:
    """Steps of the first environment and passes of the policy, in processes that then end.

    A failure is none of the run's: whoever fails here will fail at work too, unless it was only
    the random play.

    Attributes:
        servers: that the processes come from.
        factory: pickled, of the first environment.
        env_options: keyword arguments of `TorchRLEnvironment`.
        pass_job: how to time the policy on the observations of such an environment; None if it
            takes nothing of the cores.
        ask: sends a job to a worker and returns its answer; None if it fails or takes too long.
    """

    servers: Servers
    factory: bytes
    env_options: dict[str, Any]
    pass_job: Callable[[Description], PassJob | None]
    ask: Callable[[WorkerProcess, object], tuple[str, Any, Any] | None]

    def steps(self) -> tuple[StepCosts, Description | None] | None:
        """What steps cost, and what the environment is; None if that can't be told.

        Then it is known, too, whether executors need torch, and their server imports what the
        environment has imported.
        """
        for _ in range(2):
            target = "torchrl_hts._planning.probe:run_probe"
            probe = self.servers.spawn_executor("executor 0", target, [])
            answer = self.ask(probe, (self.factory, self.servers.with_torch, self.env_options))
            if answer is None:
                return None
            kind, found, modules = answer
            if kind == "tried":
                self.servers.preload(modules)
                tried: tuple[StepCosts, Description | None] = found
                return tried
            self.servers.with_torch = True
        return None

    def passes(self, description: Description | None) -> PassCosts | None:
        """What forward passes cost; None if nothing of the cores, or if that can't be told."""
        job = None if description is None else self.pass_job(description)
        if job is None:
            return None
        target = "torchrl_hts._planning.pass_times:run_passes"
        worker = self.servers.spawn_actor("executor 0", target, [])
        answer = self.ask(worker, job)
        return None if answer is None else answer[1]


def choose_team(
    tryout: Tryout, num_envs: int, num_actors: int | None, actor_threads: int, cores: int
) -> tuple[TeamSize, Description | None]:
    """Executors and actors for environments like the one that is tried; what that one is.

    Args:
        tryout: tells what they cost; a single environment needs none.
        num_envs: environments.
        num_actors: so many, if that is given.
        actor_threads: of each actor.
        cores: that the collector may use.
    """
    description: Description | None = None
    tried = tryout.steps() if num_envs > 1 else None
    if tried is None:
        wanted = TeamSize(min(num_envs, cores), num_actors or 1)
    else:
        costs, description = tried
        wanted = team_for(
            costs,
            num_envs,
            cores,
            partial(tryout.passes, description),
            num_actors=num_actors,
            actor_threads=actor_threads,
        )
    # No more than there are descriptors for.
    actors = wanted.actors
    if num_actors is None:
        while actors > 1 and most_executors(actors) < wanted.executors:
            actors -= 1
    executors = max(1, min(wanted.executors, most_executors(actors)))
    return TeamSize(executors, actors), description
