"""What the rounds of a collector are like, once it is known what its factories make."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MAX_ROWS", "Rounds"]

MAX_ROWS = 65_535  # as many as a record of a timeline can tell


@dataclass(frozen=True)
class Rounds:
    """Environments, and steps of each.

    Attributes:
        sizes: how many environments each of this learner's factories has made: one, or a batch.
        num_envs: of all learners together.
        sync_interval: alpha, steps of each environment in a round.
        num_rounds: after which the iterator ends; None: never.
    """

    sizes: tuple[int, ...]
    num_envs: int
    sync_interval: int
    num_rounds: int | None

    @classmethod
    def of(
        cls,
        frames_per_batch: int,
        total_frames: int | None,
        sizes: Sequence[int],
        *,
        num_learners: int = 1,
        num_parts: int = 1,
        stacklevel: int,
    ) -> Rounds:
        """Whole rounds for the frames that were asked for.

        What doesn't divide is rounded up, with a warning, as TorchRL does.

        Args:
            frames_per_batch, total_frames: as they were asked for; None: an endless run.
            sizes: see above.
            num_learners: who have as many environments each.
            num_parts: into which the batches of all learners are cut.
            stacklevel: of a warning, from the caller to whoever makes the collector.

        Raises:
            ValueError: for batches of several sizes that are to be shared out, or too many
                environments.

        Example:
            >>> rounds = Rounds.of(96, None, (8, 4), stacklevel=1)
            >>> rounds.num_envs, rounds.sync_interval, rounds.units
            (12, 8, (8, 4))
        """
        own = sum(sizes)
        if len(set(sizes)) > 1 and num_parts > 1:
            raise ValueError(
                f"entries of create_env_fn make {', '.join(map(str, sorted(set(sizes))))} "
                "environments, and learners and shards take entries of one size: let each make as "
                "many, or leave world out"
            )
        if own > MAX_ROWS:
            raise ValueError(
                f"create_env_fn makes {own} environments in batches; a collector has at most "
                f"{MAX_ROWS}"
            )
        num_envs = own * num_learners
        sync_interval = -(-frames_per_batch // num_envs)
        batch = sync_interval * num_envs
        if batch != frames_per_batch:
            warnings.warn(
                f"frames_per_batch={frames_per_batch} is not divisible by the {num_envs} "
                f"environments: each batch has {batch} frames",
                stacklevel=stacklevel + 1,
            )
        num_rounds = None if total_frames is None else -(-total_frames // batch)
        if num_rounds is not None and num_rounds * batch != total_frames:
            warnings.warn(
                f"total_frames={total_frames} is not divisible by the {batch} frames of a batch: "
                f"{num_rounds * batch} frames will be collected",
                stacklevel=stacklevel + 1,
            )
        return cls(tuple(sizes), num_envs, sync_interval, num_rounds)

    def that_hold(self, frames: int) -> int:
        """How many rounds it takes for so many frames, of all learners together."""
        return -(-frames // self.frames_per_batch)

    @property
    def num_own(self) -> int:
        """Environments of this learner."""
        return sum(self.sizes)

    @property
    def units(self) -> tuple[int, ...]:
        """See `Layout.units`."""
        return self.sizes if self.num_own > len(self.sizes) else ()

    @property
    def frames_per_batch(self) -> int:
        """Frames of a batch, of all learners together."""
        return self.num_envs * self.sync_interval
