"""Environments are made by executors, of which the first may go ahead."""

from __future__ import annotations

import logging
from dataclasses import replace

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.messages import Described, NeedsTorch, Observe, Observed
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._executor.trial_observations import Observations
from torchrl_hts._supervision.workers import Workers
from torchrl_hts.errors import Failure, WorkerError

__all__ = ["Description", "make_environments", "observe_first"]

_LOG = logging.getLogger(__name__)  # what is done at the start, where it may take seconds

Description = GymDescription | TorchRLDescription

_TOLD = (Failure.RAISED, Failure.INVALID, Failure.OUT_OF_MEMORY)  # by an exception


def make_environments(workers: Workers, known: Observations | None = None) -> list[Description]:
    """Start the executors, which make all environments; returns what each says of itself.

    The first says what it has observed. Where that isn't known yet, the first executor goes
    ahead, and tells that, whether the environments need torch, and which modules the others should
    share.

    Args:
        workers: of which none has been started.
        known: what environment 0 has observed where it was tried out.
    """
    servers, num_executors = workers.servers, workers.num_executors
    factories, first_env = workers.source.factories, workers.source.first_env
    _LOG.info("making %d environments (executors: %d)", len(factories), num_executors)
    descriptions: list[Description] = []
    if known is None:
        first = _make_first(workers)
        if isinstance(first, NeedsTorch):
            workers.listener.dismiss(workers.executors[0])
            servers.with_torch = True
            first = _make_first(workers)
        assert isinstance(first, Described)
        descriptions += first.descriptions
        if num_executors > 1:  # or its server would import them for nobody
            servers.preload(first.modules)
    rest = range(1 if descriptions else 0, num_executors)
    others = [workers.spawn_executor(index) for index in rest]
    for said in workers.receive_all(others):
        if isinstance(said, NeedsTorch):
            raise ValueError(
                f"environment {first_env + said.env} is a TorchRL environment and environment "
                f"{first_env} a gymnasium one; all environments of a collector must be of one kind"
            )
        descriptions += said.descriptions
    if known is not None:
        descriptions[0] = replace(descriptions[0], observations=known)
    return descriptions


def observe_first(workers: Workers, description: Description) -> Description:
    """Environment 0's description with observations, after which it has been made anew.

    Where it can't be observed either, there are none. To be called before `Workers.share`.
    """
    first = workers.executors[0]
    workers.listener.send(first, Observe())
    said: Observed = workers.receive_all([first])[0]
    return replace(description, observations=said.observations)


def _make_first(workers: Workers) -> Described | NeedsTorch:
    """Start executor 0; returns what it says of its environments.

    It observes its first environment, if that can be put back. What ends the process at that, or
    takes too long, is for the first round to meet, and to tell where.
    """
    listener = workers.listener
    listener.observing.clear()
    first = workers.spawn_executor(0, observed=True)
    try:
        said: Described | NeedsTorch = workers.receive_all([first])[0]
    except WorkerError as error:
        if workers.is_closed() or not listener.observing or error.failure in _TOLD:
            raise
        listener.dismiss(first)
        said = workers.receive_all([workers.spawn_executor(0)])[0]
    return said
