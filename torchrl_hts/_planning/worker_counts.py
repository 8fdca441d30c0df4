"""Choosing how many executors and actors a collector has, by trying both kinds of work out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.messages import NeedsTorch
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._planning.costs import PassCosts, StepCosts, TeamSize, team_for
from torchrl_hts._planning.pass_times import PassJob, Timed
from torchrl_hts._planning.probe import ProbeJob, Tried
from torchrl_hts._processes.limits import most_executors
from torchrl_hts._processes.messages import receive_object, send_object
from torchrl_hts._processes.server_pool import Servers
from torchrl_hts._processes.worker_process import WorkerProcess
from torchrl_hts.errors import WorkerId

__all__ = ["Description", "Tryout", "as_descriptors_allow", "choose_team"]

_LOG = logging.getLogger(__name__)  # what is done at the start, where it may take seconds

Description = GymDescription | TorchRLDescription


@dataclass(frozen=True)
class Tryout:
    """Steps of the first environment and passes of the policy, in processes that then end.

    A failure is none of the run's: whoever fails here will fail at work too, unless it was only
    the random play.

    Attributes:
        servers: that the processes come from, at work on importing torch.
        factories: of the environments, pickled; the first is tried.
        env_options: keyword arguments of `TorchRLEnvironment`.
        pass_job: how to time the policy on the observations of such an environment; None if it
            takes nothing of the cores.
        limit_s: how long one of them may take, the making of the environment included.
    """

    servers: Servers
    factories: Sequence[bytes]
    env_options: dict[str, Any]
    pass_job: Callable[[Description], PassJob | None]
    limit_s: float

    def steps(self) -> tuple[StepCosts, Description | None] | None:
        """What steps cost, and what the environment is; None if that can't be told.

        Then it is known, too, whether executors need torch, and their server imports what the
        environment has imported.
        """
        for _ in range(2):
            target = "torchrl_hts._planning.probe:run_probe"
            probe = self.servers.spawn_executor(WorkerId("trial of an environment"), target, [])
            job = ProbeJob(self.factories[0], self.servers.with_torch, self.env_options)
            answer = self._ask(probe, job)
            if isinstance(answer, Tried):
                self.servers.preload(answer.modules)
                return answer.costs, answer.description
            if not isinstance(answer, NeedsTorch):
                return None
            self.servers.with_torch = True
        return None

    def passes(self, description: Description | None) -> PassCosts | None:
        """What forward passes cost, in rows of what a factory makes: a batch counts as one.

        None if it is nothing of the cores, or if that can't be told.
        """
        job = None if description is None else self.pass_job(description)
        if description is None or job is None:
            return None
        target = "torchrl_hts._planning.pass_times:run_passes"
        worker = self.servers.spawn_actor(WorkerId("trial of the policy"), target, [])
        answer = self._ask(worker, job)
        if not isinstance(answer, Timed):
            return None
        return answer.costs.of_batches(description.num_envs)

    def _ask(self, worker: WorkerProcess, job: ProbeJob | PassJob) -> object:
        """The answer of a worker that then ends; None if it takes too long, or goes without one."""
        try:
            send_object(worker.control, job)
            if not wait(worker.fds, self.limit_s):
                warnings.warn(_too_slow(worker.id, self.limit_s), stacklevel=2)
                return None
            answer: object = receive_object(worker.control)
            return answer
        except (EOFError, ConnectionError):
            return None
        finally:
            worker.dismiss()


def _too_slow(worker: WorkerId, limit_s: float) -> str:
    return (
        f"the {worker} took longer than {limit_s:g} s and was given up, so that the numbers of "
        "executors and actors follow from the cores alone: give num_executors (one for each "
        "environment, where they wait for something; few for those of make_in_thread and "
        "make_remote) and num_actors"
    )


def choose_team(
    tryout: Tryout,
    num_executors: int | None,
    num_actors: int | None,
    actor_threads: int,
    cores: int,
) -> tuple[TeamSize, Description | None]:
    """Executors and actors for environments like the one that is tried; what that one is.

    Args:
        tryout: tells what they cost; a single environment needs none.
        num_executors: so many, if that is given; then nothing is tried.
        num_actors: so many, if that is given.
        actor_threads: of each actor.
        cores: that the collector may use.
    """
    num_envs = len(tryout.factories)
    if num_executors is not None:
        return TeamSize(min(num_envs, num_executors), num_actors or 1), None
    if num_envs > 1:
        _LOG.info("trying an environment and the policy out, to choose the number of workers")
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
    return as_descriptors_allow(wanted, fewer_actors=num_actors is None), description


def as_descriptors_allow(wanted: TeamSize, *, fewer_actors: bool = True) -> TeamSize:
    """No more workers than there are file descriptors for.

    Args:
        wanted: how many would be best.
        fewer_actors: whether there may be fewer actors, so that executors have more descriptors.
    """
    actors = wanted.actors
    if fewer_actors:
        while actors > 1 and most_executors(actors) < wanted.executors:
            actors -= 1
    return TeamSize(max(1, min(wanted.executors, most_executors(actors))), actors)
