"""Which rows of a slot an actor runs when units are ready, and when it may answer them.

A unit is an environment, or a batch of them that steps as a whole. It is answered as a whole, when
the last of its rows has been run; a pass takes rows, whosever they are.

Axes: N environments, T steps of a round.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._rounds.schedule import Schedule
from torchrl_hts._rounds.shared_memory import Layout

__all__ = ["Passes", "Rows"]

Rows = npt.NDArray[np.intp]  # of a slot, environment-major: row i * T + t of a flat array


class Passes:
    """Cuts the rows of ready units into passes.

    Args:
        schedule: the schedule, over shared words.
        layout: how many environments each unit has.

    Attributes:
        group: so many environments are given bits by themselves, whoever else there is.
    """

    def __init__(self, schedule: Schedule, layout: Layout) -> None:
        self.group = layout.group
        self._schedule = schedule
        # The rows of the first step, by unit; None where each unit is one environment.
        self._first_rows: list[Rows] | None = None
        self._alike: Rows | None = None  # the same in one array, where units have as many rows
        if layout.units:
            envs = map(layout.rows, range(layout.num_units))
            self._first_rows = [np.array(own) * layout.sync_interval for own in envs]
            if len({*map(len, self._first_rows)}) == 1:
                self._alike = np.stack(self._first_rows)

    def of(
        self, units: Sequence[int], sizes: InvariantSizes
    ) -> Iterator[tuple[Sequence[int], Rows]]:
        """As few passes as the rows of all these units can be run in.

        Args:
            units: ascending, all in one round.
            sizes: the batch sizes that agree.

        Yields:
            The units that have all their actions after a pass, and the rows that it runs.
        """
        steps, interval = self._schedule.steps, self._schedule.sync_interval
        if self._first_rows is None:
            for envs in self._batches(units, sizes):
                # In Python, which is quicker than numpy with so few.
                yield envs, np.array([env * interval + steps[env] % interval for env in envs])
            return
        ends = [*accumulate(len(self._first_rows[unit]) for unit in units)]
        if self._alike is None:
            own = [self._first_rows[unit] + steps[unit] % interval for unit in units]
            ready = np.concatenate(own)
        else:
            at = np.array([steps[unit] % interval for unit in units])
            ready = (self._alike.take(units, 0) + at[:, None]).reshape(-1)
        run = answered = 0
        for rows in self._cut(ready, sizes):
            run += len(rows)
            before, answered = answered, bisect_right(ends, run)
            yield units[before:answered], rows

    def _batches(self, envs: Sequence[int], sizes: InvariantSizes) -> list[Sequence[int]]:
        """Environments in batches that can be run."""
        if not sizes.fixed_rows:
            return sizes.split(envs)
        groups: dict[int, list[int]] = {}  # a batch has one row for each position in a group
        for env in envs:
            groups.setdefault(env // self.group, []).append(env)
        return [*groups.values()]

    def _cut(self, rows: Rows, sizes: InvariantSizes) -> list[Rows]:
        """The same of rows, of which there may be many."""
        if not sizes.fixed_rows:
            parts = -(-len(rows) // sizes.full_size)
            return np.array_split(rows, parts) if parts > 1 else [rows]
        groups = rows // (self._schedule.sync_interval * self.group)
        return np.split(rows, np.flatnonzero(np.diff(groups)) + 1)
