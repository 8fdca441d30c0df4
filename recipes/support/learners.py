"""The learners of a run: this process, and those that torchrun or srun has started beside it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from support.errors import RecipeError
from support.metrics import Row, learning_metrics
from support.options import RunOptions, check_minibatches, to_json
from support.states import versions
from torchrl_hts import World

__all__ = ["check_finite", "episodes_of_all", "learners", "loss_of", "minibatches"]

_OF_A_MACHINE = ("num_actors", "num_executors")
_OF_EPISODES = (("next", "reward"), ("next", "done"), ("collector", "traj_ids"))


@contextlib.contextmanager
def learners(options: RunOptions) -> Iterator[World]:
    """Join the other learners, if there are any; all must have the same options and versions.

    Raises:
        ValueError: if so many learners can't share the shards.
        RecipeError: if they can't share the batch.
        WorldError: names a learner that has other options or versions, or doesn't come.
    """
    with World(shards=options.shards, threads=options.torch_threads) as world:
        given = to_json(options)
        world.agree(**{name: given[name] for name in given if name not in _OF_A_MACHINE})
        world.agree(**versions())  # also of packages that the world doesn't know, such as games
        options.check_learners(world.size)
        yield world


def episodes_of_all(world: World, batch: TensorDictBase) -> TensorDictBase:
    """What `EpisodeReturns` reads of a batch, of all learners' rows in the order of environments.

    Args:
        world: the learners, all of which call this.
        batch: of this learner.
    """
    if world.size == 1:
        return batch
    return torch.cat(world.gather(batch.select(*_OF_EPISODES).cpu().clone()))


def loss_of(losses: TensorDictBase) -> Tensor:
    """What is minimised, of what TorchRL's loss modules return."""
    return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]


def minibatches(
    world: World,
    parts: Sequence[TensorDictBase],
    size: int,
    *,
    seed: int,
    epoch: int,
    whole_rows: bool = False,
) -> Iterator[list[TensorDictBase]]:
    """Yield minibatches in a random order, with advantages of mean 0 and deviation 1 in each.

    A learner alone, without shards, takes its order from torch's generator.

    Args:
        world: the learners.
        parts: of a batch, as `World.parts` gives them.
        size: steps of a minibatch, of all parts of all learners together.
        seed: of the run.
        epoch: counts the passes over this batch.
        whole_rows: mix rows ``[n, T]`` instead of steps, for recurrent networks.

    Raises:
        RecipeError: if each minibatch can't have as many steps of every part, or whole rows.
    """
    items = [part if whole_rows else part.reshape(-1) for part in parts]
    length = items[0][0].numel()  # steps of an item: one, or T
    total = items[0].numel() * world.num_parts
    alone = world.size == 1 and world.shards is None
    check_minibatches(total, size, None if alone else world.num_parts, length)
    if alone:
        for indices in torch.randperm(len(items[0])).split(size // length):
            minibatch = [items[0][indices]]
            world.normalize(minibatch)
            yield minibatch
        return
    count = max(1, total // size)
    for minibatch in world.minibatches(items, count, seed=seed, epoch=epoch, whole_rows=whole_rows):
        world.normalize(minibatch)
        yield minibatch


def check_finite(world: World, row: Row, losses: Sequence[TensorDictBase], step: int) -> None:
    """Refuse an optimizer step with an infinite loss or gradient, or NaN; on every learner.

    Args:
        world: the learners.
        row: the step's metrics, of all learners.
        losses: of which they are the means, for each part of this learner.
        step: environment steps that have been learned from.

    Raises:
        RecipeError: names those that are alone with it.
    """
    wrong = [name for name, value in row.items() if not math.isfinite(value)]
    if not wrong:
        return
    own = learning_metrics(losses, torch.zeros(()), 0.0, lambda parts: torch.stack([*parts]).sum(0))
    found = world.gather([name for name in wrong if not math.isfinite(own[name])])
    blame = ""
    for name in wrong:
        ranks = [str(rank) for rank, names in enumerate(found) if name in names]
        if 0 < len(ranks) < world.size:
            many = "s" * (len(ranks) > 1)
            blame = (
                f". Of rank{many} {', '.join(ranks)} alone {name} is infinite or NaN: look at the "
                "rewards and observations there"
            )
            break
    raise RecipeError(
        f"the training has diverged: {', '.join(wrong)} after {step:,} steps{blame}. Begin anew "
        "with another --output-dir and a lower --learning-rate"
    )
