"""What is drawn at random for a part of a batch, whichever rank has it."""

from __future__ import annotations

import torch
from ranks import results, run_ranks
from tensordict import TensorDict
from torch import nn

from torchrl_hts._world.world import World


def drawn(shards: int | None) -> list[list[float]]:
    """What the loops over gradients of two rounds draw for each part of all ranks, and after."""
    torch.manual_seed(5)
    found, model = [], nn.Linear(2, 1)
    with World(shards=shards, timeout_s=30) as world:
        for round_ in (3, 3, 4):
            rows = 4 // world.size
            values = {"x": torch.ones(rows, 2), "policy_version": torch.full((rows,), round_)}
            batch = TensorDict(values, [rows])
            own = []
            for part in world.gradients(model, batch):
                own.append(float(torch.rand(())))
                model(part["x"]).sum().backward()
            found.append([value for values in world.gather(own) for value in values])
        found.append([float(torch.rand(()))])
    return found


def test_what_is_drawn_for_a_part_is_the_same_for_every_number_of_ranks() -> None:
    found = [draws for size in (1, 2, 4) for draws in results(run_ranks(drawn, size, 4))]
    assert all(draws == found[0] for draws in found)
    *loops, after = found[0]
    assert len({value for values in loops for value in values}) == 12
    torch.manual_seed(5)
    nn.Linear(2, 1)
    assert after == [float(torch.rand(()))]  # as if nothing had been drawn


def test_without_shards_no_two_ranks_draw_the_same() -> None:
    """Though all were seeded alike; in two rounds and two passes of one of them."""
    (*loops, after), *others = results(run_ranks(drawn, 2, None))
    assert [[*loops, after]] == others
    assert len({value for values in loops for value in values}) == 6
    alone = results(run_ranks(drawn, 1, None))[0][-1]
    assert alone != after, "a rank by itself draws from the generator as it is"


def drawn_outside() -> list[list[float]]:
    """What is drawn for each part of all ranks in two epochs, and after."""
    torch.manual_seed(5)
    with World(shards=4, timeout_s=30) as world:
        found = []
        for epoch in (0, 1):
            own = []
            for index in range(world.parts_per_rank):
                with world.drawing(index, 7, epoch):
                    own.append(float(torch.rand(())))
            found.append([value for values in world.gather(own) for value in values])
    return [*found, [float(torch.rand(()))]]


def test_what_is_drawn_outside_of_gradients_is_the_same_for_every_number_of_ranks() -> None:
    found = [draws for size in (1, 2, 4) for draws in results(run_ranks(drawn_outside, size))]
    assert all(draws == found[0] for draws in found)
    first, second, after = found[0]
    assert len({*first, *second}) == 8
    assert after == [float(torch.rand((), generator=torch.Generator().manual_seed(5)))]
