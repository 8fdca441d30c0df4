"""What is drawn at random for a part of a batch: the same whichever learner has the part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["PartDraws", "permutation"]


def permutation(steps: int, *words: int) -> Tensor:
    """An order of so many steps that depends on some numbers alone, each of them 0 or more.

    Example:
        >>> permutation(4, 1, 2).sort().values
        tensor([0, 1, 2, 3])
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
    return torch.from_numpy(generator.permutation(steps))


class PartDraws:
    """Torch's generators, seeded for each part of each pass over the parts.

    Losses draw from them: for an entropy that is estimated by samples, or for dropout. The seed
    comes from the round, the pass within the round, the part, and the seed of the run. So a run
    that goes on from a checkpoint between two rounds draws what the whole one has drawn.

    Args:
        seed: of the run, the same on all learners.
        first: number of this learner's first part among those of all.
    """

    def __init__(self, seed: int, first: int) -> None:
        self._seed, self._first = seed, first
        self._round, self._pass = -1, 0

    def begin(self, part: TensorDictBase) -> None:
        """A pass begins, with this part."""
        version = part.get("policy_version", None)
        round_ = 0 if version is None else int(version.flatten()[0])
        self._pass = self._pass + 1 if round_ == self._round else 0
        self._round = round_

    @contextmanager
    def of(self, index: int, device: torch.device) -> Iterator[None]:
        """While one of the parts is worked on; what is drawn elsewhere goes on as if it were not.

        Args:
            index: of this learner's parts.
            device: where else than on the CPU numbers are drawn.
        """
        words = (self._seed, self._round, self._pass, self._first + index)
        seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            # Not torch.manual_seed: where CUDA is unused it formats a stack for each seed, 1 ms.
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                torch.cuda.default_generators[device.index or 0].manual_seed(seed)
            yield
