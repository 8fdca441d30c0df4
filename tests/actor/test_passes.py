"""Rows in passes: every row of what is ready once, and no unit answered before its last row."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from torchrl_hts._actor.passes import Passes
from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._rounds.schedule import Schedule
from torchrl_hts._rounds.shared_memory import Layout

T = 3


def passes_of(units: tuple[int, ...], steps: list[int], *, group: int = 0) -> Passes:
    layout = Layout(
        sum(units), T, 1, 0, (), (), group=group, units=() if set(units) == {1} else units
    )
    return Passes(Schedule(len(units), T, 1, steps=steps), layout)


@pytest.mark.parametrize("units", [(1, 1, 1, 1), (4,), (2, 1, 3), (1, 5), (2, 2, 2)])
@pytest.mark.parametrize("group", [1, 2])
def test_rows_are_run_once_and_units_answered_when_all_theirs_are(
    units: tuple[int, ...], group: int
) -> None:
    """Whatever is ready, wherever each is in its round, and whatever a batch holds."""
    steps = [T + index % T for index in range(len(units))]  # each is elsewhere in the round
    envs = [range(sum(units[:unit]), sum(units[: unit + 1])) for unit in range(len(units))]
    num_envs = sum(units)
    for count, full in product(range(1, len(units) + 1), range(1, num_envs + 1)):
        sizes = InvariantSizes((full,), full, fixed_rows=False)
        for ready in combinations(range(len(units)), count):
            wanted = [env * T + steps[unit] % T for unit in ready for env in envs[unit]]
            check(passes_of(units, steps), units, ready, sizes, wanted)
    if num_envs % group == 0:
        fixed = InvariantSizes((num_envs // group,), num_envs // group, fixed_rows=True)
        wanted = [env * T + steps[unit] % T for unit in range(len(units)) for env in envs[unit]]
        passes = passes_of(units, steps, group=num_envs // group)
        check(passes, units, tuple(range(len(units))), fixed, wanted)


def check(
    passes: Passes,
    units: tuple[int, ...],
    ready: tuple[int, ...],
    sizes: InvariantSizes,
    wanted: list[int],
) -> None:
    run: list[int] = []
    told: list[int] = []
    left = dict.fromkeys(ready, 0)
    ends = dict(zip(ready, np.cumsum([units[unit] for unit in ready]).tolist(), strict=True))
    for answered, rows in passes.of(ready, sizes):
        assert 1 <= len(rows) <= sizes.full_size
        if sizes.fixed_rows:
            assert len({row // T // passes.group for row in rows.tolist()}) == 1
        run += rows.tolist()
        assert all(ends[unit] <= len(run) for unit in answered), "answered before its last row"
        told += answered
        left = {unit: end for unit, end in ends.items() if unit not in told}
        assert all(end > len(run) for end in left.values()), "all rows there, and not answered"
    assert run == wanted
    assert told == [*ready]
    assert not left
