"""The steps that an off-policy loss learns from: a replay buffer for each part of a batch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer

from support.errors import RecipeError
from support.sac_options import SACOptions
from torchrl_hts import World

__all__ = ["Experience"]

_SAMPLES = 1  # sets these draws apart from those of the loss


class Experience:
    """The newest steps of this learner's environments, and samples of them.

    Each part of a batch (`World.parts`) has a `ReplayBuffer` of its own: one, but with shards. What
    is drawn depends on the seed, the round, the sample's number within the round, and the part. So
    it is the same in a run that was resumed, and with shards for every number of learners.

    Args:
        world: the learners.
        keys: of a batch, that are kept.
        options: say how many steps are kept, and how many are drawn, of all parts together.
    """

    def __init__(self, world: World, keys: Sequence[NestedKey], options: SACOptions) -> None:
        self._world, self._keys, self._seed = world, keys, options.seed
        self._first = world.rank * world.parts_per_rank  # of its parts, among those of all
        all_steps = options.num_rounds * options.frames_per_batch
        self._room = min(options.buffer_size, all_steps)  # in steps, of all parts
        self._buffers = [
            ReplayBuffer(
                storage=LazyTensorStorage(self._room // world.num_parts),
                batch_size=options.batch_size // world.num_parts,
            )
            for _ in range(world.parts_per_rank)
        ]
        self._round = self._samples = 0

    def extend(self, batch: TensorDictBase) -> None:
        """Keep the steps of a batch ``[n, T]``, in place of the oldest if there is no more room.

        Raises:
            RecipeError: if there is no memory for as many as are to be kept.
        """
        self._round, self._samples = int(batch["policy_version"].flatten()[0]), 0
        parts = self._world.parts(batch.select(*self._keys))
        self._check_memory(parts[0])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.extend(part.reshape(-1))

    def _check_memory(self, part: TensorDictBase) -> None:
        """Refuse, with the first steps, what the machine would kill when the buffer fills."""
        here = self._room * self._world.local_size // self._world.size
        size = part.bytes() // part.numel() * here
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > memory:
            raise RecipeError(
                f"the {here:,} steps of --buffer-size take {size / 1e9:,.1f} GB here, and this "
                f"machine has {memory / 1e9:,.1f} GB of memory: give less"
            )

    def sample(self) -> list[TensorDictBase]:
        """Steps ``[batch_size / parts]`` of each part, drawn with replacement.

        Their ``"policy_version"`` is the round that learns from them: `World.gradients` seeds the
        loss's own draws by it.
        """
        drawn = []
        for index, buffer in enumerate(self._buffers):
            with self._world.drawing(index, self._seed, self._round, self._samples, _SAMPLES):
                part = buffer.sample()
            part["policy_version"] = torch.full(part.shape, self._round)
            drawn.append(part)
        self._samples += 1
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """All steps, as copies, and where the next ones go."""
        return {
            "first": self._first,
            "parts_of_all": self._world.num_parts,
            "parts": [
                {"steps": buffer[:].clone().to_dict(), "writer": buffer.writer.state_dict()}
                for buffer in self._buffers
            ],
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the states of the learners that had these environments.

        Raises:
            RecipeError: if they had another number of parts.
        """
        saved_parts = states[0]["parts_of_all"]
        if saved_parts != self._world.num_parts:
            raise RecipeError(
                f"the replay buffer is of {saved_parts} learners, and here are "
                f"{self._world.num_parts}: start as many, or begin a run with --shards"
            )
        saved = {
            number: part
            for state in states
            for number, part in enumerate(state["parts"], state["first"])
        }
        for number, buffer in enumerate(self._buffers, self._first):
            buffer.empty()
            buffer.extend(TensorDict.from_dict(saved[number]["steps"], batch_dims=1))
            buffer.writer.load_state_dict(saved[number]["writer"])
