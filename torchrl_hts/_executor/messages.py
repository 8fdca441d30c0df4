"""What an executor is told, and what it says, over its control connection.

To an executor: `ExecutorJob`, maybe `Observe`, `ExecutorPlan`, and then `StartExecutor` each time
that it is set to work. `Failed` and `Stopped` it says as actors do (``_rounds/replies.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_hts._executor.gym_env import GymDescription, RowOptions
from torchrl_hts._executor.trial_observations import Observations
from torchrl_hts._rounds.shared_memory import Layout

if TYPE_CHECKING:
    from torchrl_hts._executor.torchrl_env import TorchRLDescription

__all__ = [
    "Described",
    "ExecutorJob",
    "ExecutorPlan",
    "Made",
    "NeedsTorch",
    "Observe",
    "Observed",
    "Observing",
    "Saved",
    "Start",
    "StartExecutor",
    "Unsaved",
]


Start = int | tuple[int, ...] | bytes


@dataclass(frozen=True)
class ExecutorJob:
    """To an executor, first: what to make. Answered by `Described`, or by `NeedsTorch`.

    Attributes:
        factories: pickled environment factories, and
        env_indices: the indices of what they make, each an environment or a batch of them.
        first_env: the number of this learner's first factory among those of all learners.
        observed: whether the first environment is to be observed, if it can be put back, before
            the others are made. `Observing` says that this begins.
        torch_allowed: False in a process that should not import torch.
        seed: of the collector, which what is drawn while environments are made depends on.
        env_options: keyword arguments of `TorchRLEnvironment`.
    """

    factories: tuple[bytes, ...]
    env_indices: tuple[int, ...]
    first_env: int
    observed: bool
    torch_allowed: bool
    seed: int
    env_options: dict[str, Any]


@dataclass(frozen=True)
class Observing:
    """From an executor, before it observes its first environment: what may end the process.

    Attributes:
        env: the index of the environment.
    """

    env: int


@dataclass(frozen=True)
class Made:
    """From an executor, each time that it has made an environment.

    Attributes:
        env: the index of the environment.
    """

    env: int


@dataclass(frozen=True)
class NeedsTorch:
    """From an executor that may not import torch, before it ends: another has to take over.

    Attributes:
        env: the index of an environment that is TorchRL's.
    """

    env: int


@dataclass(frozen=True)
class Described:
    """From an executor, when it has made all its environments.

    Attributes:
        descriptions: what each says of itself, in their order.
        modules: names of all that was imported for it.
    """

    descriptions: Sequence[GymDescription | TorchRLDescription]
    modules: Sequence[str]


@dataclass(frozen=True)
class Observe:
    """To executor 0 or an evaluator, when a policy refuses what is made up.

    Answered by `Observed`.
    """


@dataclass(frozen=True)
class Observed:
    """From an executor or an evaluator: its first environment, which has been made anew since.

    Attributes:
        observations: that it gave; None if it can't be observed.
    """

    observations: Observations | None


@dataclass(frozen=True)
class ExecutorPlan:
    """To an executor, when the slots are laid out: where everything lies. Not answered.

    Attributes:
        layout: the shared memory's layout.
        last_round: the round at which the run ends; None for an endless one.
        worker: its row of counters.
        options: how rows are written.
        cores: the number of cores to keep busy; None where there are several actors: then nothing
            that took long is kept back.
        a_core_each: whether there are cores enough for all threads of executors and actors.
    """

    layout: Layout
    last_round: int | None
    worker: int
    options: RowOptions
    cores: int | None
    a_core_each: bool


@dataclass(frozen=True)
class StartExecutor:
    """To an executor at rest: begin to work. Answered by `Stopped`, after a STOP, or by `Failed`.

    Attributes:
        starts: by index of what a factory has made and begins anew: a seed, one for each of the
            environments of a batch, or a saved state.
    """

    starts: Mapping[int, Start]


@dataclass(frozen=True)
class Saved:
    """From an executor, after a SAVE.

    Attributes:
        states: of each of its environments, by index.
    """

    states: Mapping[int, bytes]


@dataclass(frozen=True)
class Unsaved:
    """From an executor, after a SAVE: one of its environments can't be saved.

    Attributes:
        env_indices: the environment, or those of a batch, among this learner's.
        why: for people.
    """

    env_indices: tuple[int, ...]
    why: str
