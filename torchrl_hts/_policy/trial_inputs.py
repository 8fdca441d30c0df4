"""What a policy is tried with before the first round: real observations, and rows made of them.

Whether two batch sizes round alike shows in many different rows only, and an environment has shown
a few. To compare bits, made-up rows serve as well as real ones, where the policy takes them.

Axes: m real rows, n others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_hts._rounds.entries import leaves
from torchrl_hts._rounds.keys import Key

__all__ = ["TrialInputs"]

_TRIED_ROWS = 64


@dataclass(frozen=True)
class TrialInputs:
    """Inputs of a policy.

    Attributes:
        real: TensorDict ``[m]``: what an environment gave, resets first; None if that isn't known.
        num_resets: so many of these rows are of resets.
        made_up: TensorDict ``[n]`` of random values, drawn from the spaces.
        added: keys of what the collector adds, such as recurrent states: made up in all kinds of
            rows but the last.
        passed_over: so many kinds of rows are left out, since the policy has refused them.

    Example:
        >>> from tensordict import TensorDict
        >>> mask = torch.tensor([[True, False], [False, True]])
        >>> real = TensorDict({"mask": mask, "x": torch.zeros(2, 1)}, [2])
        >>> made_up = TensorDict({"mask": torch.rand(8, 2) < 0.5, "x": torch.randn(8, 1)}, [8])
        >>> trial = TrialInputs(real, 2, made_up)
        >>> trial.rows(5)["mask"].sum(-1)
        tensor([1, 1, 1, 1, 1])
        >>> [kind["x"].any().item() for kind in trial.kinds()]
        [True, True, False, False]
    """

    real: TensorDictBase | None
    num_resets: int
    made_up: TensorDictBase
    added: tuple[Key, ...] = ()
    passed_over: int = 0

    def rows(self, count: int) -> TensorDictBase:
        """So many real rows, repeated and permuted; made-up ones if there is no real one."""
        source = self.made_up if self.real is None else self.real
        return source[_repeated(source.shape[0], count)].contiguous()

    def select(self, keys: Sequence[Key]) -> TrialInputs:
        """The same of these keys alone."""
        real = None if self.real is None else self.real.select(*keys)
        added = tuple(key for key in self.added if key in keys)
        return replace(self, real=real, made_up=self.made_up.select(*keys), added=added)

    def extended(
        self, rows: TensorDictBase, made_up: TensorDictBase, added: tuple[Key, ...]
    ) -> TrialInputs:
        """The same with more entries, of these keys: real ones in `rows`, which has all rows."""
        real = None if self.real is None else rows[: self.real.shape[0]].contiguous()
        return replace(self, real=real, made_up=made_up, added=self.added + added)

    @property
    def num_kinds(self) -> int:
        """How many `kinds` there are."""
        return 1 if self.real is None else 4 - self.passed_over

    def kinds(self) -> Iterator[TensorDictBase]:
        """Rows ``[n]`` to compare bits with, kind by kind, each nearer to real ones.

        The first is made up. The second has real values but for the floats, in the third those of
        each row and key have changed places, and the last is real. All come of the resets alone,
        which don't depend on who has observed them.
        """
        make = [self._made_up, self._real_but_floats, self._shuffled, self._resets]
        for kind in make[self.passed_over :][: self.num_kinds]:
            yield kind()

    def accepted_by(self, run: Callable[[TensorDictBase], object]) -> TrialInputs:
        """The same without the kinds before the first, on a few rows of which nothing is raised."""
        for index, kind in enumerate(self.kinds(), 1):
            try:
                run(kind[:_TRIED_ROWS])
            except Exception:
                if index < self.num_kinds:
                    continue
            return replace(self, passed_over=self.passed_over + index - 1)
        return self

    def _made_up(self) -> TensorDictBase:
        return self.made_up

    def _resets(self) -> TensorDictBase:
        assert self.real is not None
        count = self.made_up.shape[0]
        return self.real[: self.num_resets][_repeated(self.num_resets, count)].contiguous()

    def _real_but_floats(self) -> TensorDictBase:
        rows = self._resets()
        for key, value in leaves(self.made_up):
            if value.is_floating_point() or key in self.added:
                rows[key] = value
        return rows

    def _shuffled(self) -> TensorDictBase:
        rows = self._resets()
        generator = torch.Generator().manual_seed(0)
        for key, value in leaves(self.made_up):
            rows[key] = value if key in self.added else _shuffled(rows[key], generator)
        return rows


def _repeated(available: int, count: int) -> Tensor:
    """Indices of so many rows: all there are, as often as it takes, in another order each time."""
    generator = torch.Generator().manual_seed(0)
    first = torch.arange(available)
    times = -(-count // max(1, available)) - 1
    orders = [torch.randperm(available, generator=generator) for _ in range(times)]
    return torch.cat([first, *orders])[:count]


def _shuffled(values: Tensor, generator: torch.Generator) -> Tensor:
    """The elements of each row in an order of its own."""
    flat = values.reshape(len(values), -1)
    order = torch.rand(flat.shape, generator=generator).argsort(1)
    return flat.gather(1, order).reshape(values.shape)
