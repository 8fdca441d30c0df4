"""What is drawn at random for a part of a batch: the same whichever learner has the part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_hts._world.generators import forked_generators, seed_generators

__all__ = ["PartDraws", "minibatches", "permutation", "seeded"]


def permutation(steps: int, *words: int) -> Tensor:
    """An order of so many steps that depends on some numbers alone, each of them 0 or more.

    Example:
        >>> permutation(4, 1, 2).sort().values
        tensor([0, 1, 2, 3])
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
    return torch.from_numpy(generator.permutation(steps))


def minibatches(
    parts: Sequence[TensorDictBase],
    count: int,
    first: int,
    seed: int,
    epoch: int,
    *,
    whole_rows: bool = False,
) -> Iterator[list[TensorDictBase]]:
    """Yield so many minibatches, each of them a part of every part, permuted by itself.

    Args:
        parts: ``[n, T]`` each, with ``"policy_version"``, which is the round.
        count: divides n * T; with whole rows, n.
        first: number of this learner's first part among those of all.
        seed: of the run.
        epoch: counts how often this batch has been gone through.
        whole_rows: permute rows instead of steps.

    Raises:
        ValueError: if the steps, or rows, can't be shared out equally.
    """
    items = [part if whole_rows else part.reshape(-1) for part in parts]
    if count < 1 or len(items[0]) % count:
        what = f"{len(items[0])} {'rows' if whole_rows else 'steps'}"
        raise ValueError(f"{what} of a part can't be cut into {count} minibatches")
    round_ = int(items[0]["policy_version"].flatten()[0])
    own = range(first, first + len(items))
    orders = [permutation(len(items[0]), seed, round_, epoch, part) for part in own]
    cut = [order.reshape(count, -1) for order in orders]
    for number in range(count):
        yield [part[order[number]] for part, order in zip(items, cut, strict=True)]


@contextmanager
def seeded(words: Sequence[int], device: torch.device) -> Iterator[None]:
    """Inside, torch's generators are seeded; what is drawn elsewhere goes on as if they weren't.

    Args:
        words: what the seed is made of, each 0 or more.
        device: where else than on the CPU numbers are drawn.
    """
    seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)
    with forked_generators(device):
        seed_generators(seed, device)
        yield


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

    def of(self, index: int, device: torch.device) -> AbstractContextManager[None]:
        """While one of the parts is worked on; see `seeded`.

        Args:
            index: of this learner's parts.
            device: where else than on the CPU numbers are drawn.
        """
        return seeded((self._seed, self._round, self._pass, self._first + index), device)
