"""An executor's environments: made, described and, where a policy needs it, observed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium as gym

from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_env import GymEnvironment
from torchrl_hts._executor.made_once import check_made_once, gymnasium_parts
from torchrl_hts._executor.messages import (
    Described,
    ExecutorJob,
    Made,
    NeedsTorch,
    Observed,
    Observing,
)
from torchrl_hts._executor.old_gym import REMEDY, is_old_gym
from torchrl_hts._executor.own_seeds import seed_from_own_draws, unseeded_spaces
from torchrl_hts._executor.trial_observations import (
    Observations,
    gym_observations,
    observed,
    observed_and_restored,
)
from torchrl_hts._executor.vector_env import VectorEnvironment
from torchrl_hts._processes.messages import receive_object, send_object, unpickled
from torchrl_hts._processes.raised import Raised
from torchrl_hts._processes.registrations import explaining_what_is_missing
from torchrl_hts._rounds.replies import Failed
from torchrl_hts.errors import EnvError

if TYPE_CHECKING:
    from torchrl_hts._executor.torchrl_env import TorchRLEnvironment

    Environment: TypeAlias = GymEnvironment | VectorEnvironment | TorchRLEnvironment

__all__ = ["FAILURES", "EnvironmentFailedError", "make_environments", "observe_first"]

FAILURES = BaseException  # of an environment: some engines call sys.exit


class EnvironmentFailedError(Exception):
    """An environment failed.

    Attributes:
        told: what the main process is to hear of it.
    """

    def __init__(
        self, envs: Iterable[int], round_: int | None, step: int | None, error: BaseException
    ) -> None:
        self.told = Failed(Raised.of(error), tuple(envs), round_, step)


class _NeedsTorchError(Exception):
    """The factory makes a TorchRL environment, and this process shall not import torch."""


def make_environments(
    environments: dict[int, Environment], job: ExecutorJob, control: Connection
) -> None:
    """Make what a job asks for, and tell the main process of each and, in the end, what they are.

    Args:
        environments: takes what is made, by index; also where not all can be made.
        job: says what to make.
        control: connection to the main process.

    Raises:
        EnvironmentFailedError: if an environment can't be made.
        EOFError: if one is TorchRL's and this process should not import torch, when the main
            process has been told and has hung up.
    """
    observations: Observations | None = None
    seed_from_own_draws()
    for index, factory in zip(job.env_indices, job.factories, strict=True):
        try:
            environments[index] = first = _make(factory, index, job)
            if job.observed and len(environments) == 1 and isinstance(first, GymEnvironment):
                send_object(control, Observing(index))
                observations, is_back = observed_and_restored(first.env)
                if not is_back:
                    environments[index] = _made_anew(first, factory, job)
        except _NeedsTorchError:
            send_object(control, NeedsTorch(index))
            receive_object(control)  # the end of the connection: another process takes over
        except FAILURES as error:
            raise EnvironmentFailedError([index], None, None, error) from error
        send_object(control, Made(index))
    descriptions: list[Any] = [environment.description for environment in environments.values()]
    descriptions[0] = replace(descriptions[0], observations=observations)
    send_object(control, Described(descriptions, list(sys.modules)))


def observe_first(
    environments: dict[int, Environment], job: ExecutorJob, control: Connection
) -> None:
    """Tell the main process what the first environment has to show; another takes its place."""
    first = environments[job.env_indices[0]]
    observations = observed(partial(_observations, first))
    environments[first.index] = _made_anew(first, job.factories[0], job)
    send_object(control, Observed(observations))


@unseeded_spaces()
def _make(factory: bytes, index: int, job: ExecutorJob) -> Environment:
    # What is drawn while it is made is not to depend on its neighbours, or on other learners.
    number = job.first_env + index
    generators = Generators(job.seed, number)
    generators.enter()
    make = unpickled(factory)
    with explaining_what_is_missing():
        env = make()
    name = f"create_env_fn[{number}]"
    if isinstance(env, gym.vector.VectorEnv):  # first, for EnvPool's are both
        check_made_once(name, gymnasium_parts(env))
        return VectorEnvironment(env, index, generators)
    if isinstance(env, gym.Env):
        check_made_once(name, gymnasium_parts(env))
        return GymEnvironment(env, index, generators)
    if any(c.__module__ == "torchrl.envs.common" for c in type(env).__mro__):
        if not job.torch_allowed:
            raise _NeedsTorchError
        from torchrl_hts._executor.torchrl_env import TorchRLEnvironment
        from torchrl_hts._executor.torchrl_layers import torchrl_parts

        check_made_once(name, torchrl_parts(env))
        return TorchRLEnvironment(env, index, generators, **job.env_options)
    hint = f" {REMEDY}." if is_old_gym(env) else ""
    raise EnvError(
        f"{name} made a {type(env).__module__}.{type(env).__qualname__}; expected "
        f"a gymnasium.Env, a gymnasium.vector.VectorEnv or a torchrl.envs.EnvBase.{hint}"
    )


def _observations(environment: Environment) -> Observations:
    if isinstance(environment, GymEnvironment):
        return gym_observations(environment.env)
    return environment.observations()


def _made_anew(environment: Environment, factory: bytes, job: ExecutorJob) -> Environment:
    """Another in the place of an environment that has been observed."""
    with contextlib.suppress(Exception):
        environment.close()
    return _make(factory, environment.index, job)
