"""What the process that plays evaluation episodes is told, and what it says.

Each message to it is answered by one from it; `Play` is answered by an `Evaluation`. The parameters
to play with lie in shared memory, which the main process writes while the other waits for work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from torchrl.envs.utils import ExplorationType

from torchrl_hts._executor.gym_env import GymDescription, RowOptions
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Layout

__all__ = [
    "Evaluation",
    "Play",
    "PlayerDescribed",
    "PlayerJob",
    "PlayerPlan",
    "PlayerRefused",
    "Ready",
]


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation gave.

    Attributes:
        step: that it was submitted with.
        returns: undiscounted return of each episode.
        lengths: steps of each episode.
        video: the file that its best episode was written to, if it beats all earlier ones.
        video_error: why there is no such file although it does; "" if all is well.
        parameters: of the policy that played, and its buffers, by name.

    Example:
        >>> evaluation = Evaluation(step=1000, returns=(9.0, 12.0), lengths=(9, 12))
        >>> evaluation.mean, evaluation.max
        (10.5, 12.0)
    """

    step: int
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    video: Path | None = None
    video_error: str = ""
    parameters: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def mean(self) -> float:
        """Mean return."""
        return math.fsum(self.returns) / len(self.returns)

    @property
    def min(self) -> float:
        """Return of the worst episode."""
        return min(self.returns)

    @property
    def max(self) -> float:
        """Return of the best episode."""
        return max(self.returns)


@dataclass(frozen=True)
class PlayerJob:
    """To the player, first: what to play in. Answered by `PlayerDescribed` or `PlayerRefused`.

    Attributes:
        factory: the pickled environment factory.
        num_episodes: of each evaluation; an environment is made for each, or a batch for several.
        seed: of everything random.
        render_factory: the pickled factory of the environment that is filmed; None for no video.
        video_path: where the best episode goes.
        fps: frames per second of the video; None for what the environment says.
        max_frames_per_episode: length at which TorchRL's environments truncate; 0: never.
    """

    factory: bytes
    num_episodes: int
    seed: int
    render_factory: bytes | None
    video_path: Path | None
    fps: float | None
    max_frames_per_episode: int = 0


@dataclass(frozen=True)
class PlayerDescribed:
    """From the player, when it has made its environments.

    Attributes:
        description: what they say of themselves.
        to_warn_of: what in them makes evaluations depend on earlier ones, a sentence each.
    """

    description: GymDescription | TorchRLDescription
    to_warn_of: Sequence[str]


@dataclass(frozen=True)
class PlayerRefused:
    """From the player, before it ends: it can't play in what the factory makes.

    Attributes:
        why: for people.
    """

    why: str


@dataclass(frozen=True)
class PlayerPlan:
    """To the player, after `Observe` maybe: what to play with. Answered by `Ready`.

    Attributes:
        policy: the pickled policy, on the CPU and in evaluation mode.
        layout: the shared memory's layout.
        inputs: keys that the policy reads.
        outputs: keys that it writes.
        options: how rows are written.
        exploration_type: under which the policy runs.
    """

    policy: bytes
    layout: Layout
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    options: RowOptions
    exploration_type: ExplorationType


@dataclass(frozen=True)
class Ready:
    """From the player, when it can play."""


@dataclass(frozen=True)
class Play:
    """To the player, which waits for it: play. Answered by an `Evaluation`.

    Attributes:
        step: that was submitted; sampled actions depend on it.
        best: the return that an episode has to beat to be filmed.
    """

    step: int
    best: float
