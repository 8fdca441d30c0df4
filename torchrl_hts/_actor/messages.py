"""What an actor is told, and what it says, over its control connection.

To an actor: `ActorJob`, `UseSizes`, and then `StartActor` each time that it is set to work.
`Failed` and `Stopped` it says as executors do (``_rounds/replies.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrl.envs.utils import ExplorationType

from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Layout

__all__ = ["ActorJob", "Calibrated", "PolicyRefused", "StartActor", "UseSizes"]


@dataclass(frozen=True)
class ActorJob:
    """To an actor, first: what to run. Answered by `Calibrated`, or by `PolicyRefused`.

    Attributes:
        policy: the pickled policy, its tensors on the CPU.
        layout: the shared memory's layout.
        last_round: the round at which the run ends; None for an endless one.
        worker: its row of counters.
        examples: pickled `TrialInputs` of the policy, to calibrate with.
        outputs: keys that the policy writes and that are stored.
        exploration_type: under which the policy runs.
        device: where it runs.
        num_threads: torch's intra-op threads.
        owner: for each environment, the index of its executor.
        cores: the number of cores to keep busy; None where other actors read the same inbox.
        a_core_each: whether there are cores enough for all threads of executors and actors.
        sizes: the batch sizes that agree; None if the actor is to find out.
        random_policy: pickled; it takes the actions of the first rounds, if there are such.
        random_rounds: how many these are.
    """

    policy: bytes
    layout: Layout
    last_round: int | None
    worker: int
    examples: bytes
    outputs: tuple[Key, ...]
    exploration_type: ExplorationType
    device: str
    num_threads: int
    owner: tuple[int, ...]
    cores: int | None
    a_core_each: bool
    sizes: InvariantSizes | None = None
    random_policy: bytes = b""
    random_rounds: int = 0


@dataclass(frozen=True)
class Calibrated:
    """From an actor, when it is ready to work.

    Attributes:
        sizes: the batch sizes that agree.
    """

    sizes: InvariantSizes


@dataclass(frozen=True)
class PolicyRefused:
    """From an actor, before it ends: the policy can't be run so that its rows are independent.

    Attributes:
        why: for people.
    """

    why: str


@dataclass(frozen=True)
class UseSizes:
    """To an actor, when all are calibrated. Not answered.

    Attributes:
        sizes: the batch sizes that all actors agree on.
    """

    sizes: InvariantSizes


@dataclass(frozen=True)
class StartActor:
    """To an actor at rest: begin to work. Answered by `Stopped`, after a STOP, or by `Failed`.

    Attributes:
        noise_seed: of what actions are drawn with.
    """

    noise_seed: int
