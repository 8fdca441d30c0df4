"""World.normalize: mean 0 and deviation 1 over all values of all parts on all ranks."""

from __future__ import annotations

import torch
from ranks import results, run_ranks
from tensordict import TensorDict
from torch import Tensor

from torchrl_hts import World
from torchrl_hts._world.tree import tree_sum

EQUAL, UNEVEN = (300, 300, 300, 300), (300, 7, 1, 130)
CASES = [(n, dtype) for n in (EQUAL, UNEVEN) for dtype in (torch.float32, torch.bfloat16)]


def values_of(lengths: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(3 + 2 * torch.randn(n, generator=generator)).to(dtype) for n in lengths]


def normalize(shards: int | None) -> list[list[float]]:
    """What becomes of the values of all parts; without shards each rank has the second of two."""
    found = []
    with World(shards=shards, timeout_s=60) as world:
        for lengths, dtype in CASES:
            own = world.own(values_of(lengths, dtype))[-world.parts_per_rank :]
            parts = [TensorDict({"advantage": value}, [len(value)]) for value in own]
            world.normalize(parts)
            own = torch.cat([part["advantage"] for part in parts])
            found.append(torch.cat(world.gather(own)).tolist())
    return found


def test_the_number_of_ranks_and_the_lengths_of_parts_make_no_difference() -> None:
    alone, first, second = results(run_ranks(normalize, 1, 4) + run_ranks(normalize, 2, 4))
    assert alone == first == second
    for found, (lengths, dtype) in zip(alone, CASES, strict=True):
        values = values_of(lengths, dtype)
        count = sum(lengths)
        mean = tree_sum([value.sum() for value in values]) / count
        squares = tree_sum([(value - mean).square().sum() for value in values])
        deviation = (squares / (count - 1)).sqrt()
        assert found == torch.cat([(value - mean) / deviation for value in values]).tolist()
        if dtype is torch.float32:
            assert_standardized(found, values)


def test_parts_of_ranks_without_shards_may_differ_in_length() -> None:
    first, second = results(run_ranks(normalize, 2, None))
    assert first == second
    for found, (lengths, dtype) in zip(first, CASES, strict=True):
        if dtype is torch.float32:
            assert_standardized(found, values_of(lengths, dtype)[1::2])


def assert_standardized(found: list[float], values: list[Tensor]) -> None:
    whole = torch.cat(values).double()
    expected = (whole - whole.mean()) / whole.std()
    torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=0, atol=1e-5)
