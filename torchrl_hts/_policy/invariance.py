"""Which batch sizes give a row the same bits: measured, never assumed.

A row's output must not depend on which rows share its batch, nor on how many (I6). Kernels choose
their order of summation by the shape of the batch, so some sizes agree with each other bit for bit
and others do not. It is otherwise from machine to machine. The Nature CNN gave the same bits for 4
to 16 rows on one CPU, for 2 to 15 and from 16 on another. `calibrate` finds the sizes that agree on
the device, dtype and thread count in use; an actor then pads each batch to the next of them. What
no batch size can help, `module_checks.py` finds.

Axes: m rows of a batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torchrl_hts._policy.row_bits import Bits, row_marks
from torchrl_hts.errors import PolicyError

__all__ = [
    "InvariantSizes",
    "calibrate",
    "candidate_sizes",
    "choose_sizes",
    "with_larger",
]

_ROWS_PER_BATCH = 16  # what a batch costs beside its rows, in rows
_LARGE = 256  # from so many rows on, 8 sizes are tried up to twice as many
_ROWS_TRIED = 512  # at each size, at least, if there are so many; and two batches

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class InvariantSizes:
    """Batch sizes that give a row the same bits, wherever it stands and whoever shares its batch.

    Args:
        sizes: these sizes, ascending; `full_size` is the last.
        full_size: rows of the largest batch.
        fixed_rows: a row's position matters even at the full size. Then the only batch to run is
            the full one with environment i in row i, and ``sizes == (full_size,)``.
        transposed: linear layers that aren't packed have to multiply the other way round for it
            (`transposed_layers.py`).
        packed: large layers have to run with packed weights for it (`packed_layers.py`).
        blocked: numpy has to multiply rows in blocks for it (`numpy_steps.py`).

    Raises:
        ValueError: if the sizes are not as said above.

    Example:
        >>> measured = InvariantSizes((4, 5, 6, 8), full_size=8, fixed_rows=False)
        >>> measured.pad(2), measured.pad(7), measured.split([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        (4, 8, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
        >>> print(measured)
        batches of 4-6, 8 rows agree bit for bit
    """

    sizes: tuple[int, ...]
    full_size: int
    fixed_rows: bool
    transposed: bool = False
    packed: bool = False
    blocked: bool = False

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip((0, *self.sizes), self.sizes, strict=False))
        if not ascending or self.sizes[-1:] != (self.full_size,):
            raise ValueError(
                f"expected ascending sizes from 1 that end with full_size={self.full_size}, "
                f"got {self.sizes}"
            )
        if self.fixed_rows and len(self.sizes) > 1:
            raise ValueError(f"with fixed rows only the full size serves, got {self.sizes}")

    def pad(self, k: int) -> int:
        """The smallest size that holds k rows, 1 <= k <= full_size, else ValueError."""
        if not 1 <= k <= self.full_size:
            raise ValueError(f"expected 1 to {self.full_size} rows, got {k}")
        return self.sizes[bisect_left(self.sizes, k)]

    def split(self, rows: Sequence[int]) -> list[Sequence[int]]:
        """Rows in as few batches as hold them, of about the same length."""
        parts = -(-len(rows) // self.full_size)
        ends = [len(rows) * part // parts for part in range(parts + 1)]
        return [rows[start:end] for start, end in pairwise(ends)]

    def cost(self, num_envs: int) -> int:
        """Rows run, and what batches cost beside, over all numbers of rows that may be ready."""
        return sum(
            self.pad(len(batch)) + _ROWS_PER_BATCH
            for ready in range(1, num_envs + 1)
            for batch in self.split(range(ready))
        )

    def runs_like(self, other: InvariantSizes) -> bool:
        """Whether the layers run in the same way."""
        own = (self.packed, self.transposed, self.blocked)
        return own == (other.packed, other.transposed, other.blocked)

    def intersect(self, other: InvariantSizes) -> InvariantSizes:
        """The sizes that serve two actors; rows are fixed if either needs that.

        Raises:
            ValueError: if the two were measured against different full sizes, or with layers that
                run differently.
        """
        if not self.runs_like(other):
            raise ValueError(
                f"one actor found {self}, and another {other}, as may be on CPUs of different "
                "kinds: give the actors one kind, or set num_actors=1"
            )
        if self.full_size != other.full_size:
            raise ValueError(
                f"sizes measured for {self.full_size} and for {other.full_size} rows don't compare"
            )
        if self.fixed_rows or other.fixed_rows:
            return replace(self, sizes=(self.full_size,), fixed_rows=True)
        return replace(self, sizes=tuple(size for size in self.sizes if size in other.sizes))

    def __str__(self) -> str:
        how = ", large layers packed" if self.packed else ""
        how += ", linear layers transposed" if self.transposed else ""
        how += ", products in blocks of rows" if self.blocked else ""
        if self.fixed_rows:
            return f"only the full batch of {self.full_size}, each environment in its own row{how}"
        runs = groupby(enumerate(self.sizes), lambda pair: pair[1] - pair[0])
        spans = [[size for _, size in run] for _, run in runs]
        text = ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
        return f"batches of {text} rows agree bit for bit{how}"


def candidate_sizes(full_size: int) -> tuple[int, ...]:
    """Sizes worth measuring: all to 16, every 4th to 64, every 16th to 256, and `full_size`.

    Above 256 an eighth more than the last power of two, so that padding stays below that.

    Example:
        >>> candidate_sizes(22)
        (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 22)
    """
    if full_size < 1:
        raise ValueError(f"expected full_size >= 1, got {full_size}")
    steps = [*range(1, 17), *range(20, 65, 4), *range(80, _LARGE, 16)]
    power = _LARGE
    while power < full_size:
        steps += range(power, 2 * power, power // 8)
        power *= 2
    return (*(size for size in steps if size < full_size), full_size)


def calibrate(
    run: Callable[[Rows], list[Tensor]],
    full_size: int,
    candidates: Sequence[int] | None = None,
    *,
    draws: int = 4,
    seed: int = 0,
    suspects: Sequence[str] = (),
) -> InvariantSizes:
    """Find the batch sizes that agree bitwise with a full batch (METHOD section 5, point 3).

    The reference is each probe row at the full size, at the position of its environment. Against it
    are held, by their bytes: the same rows at the same positions with other batch-mates, and rows
    at other positions of a full batch. So are rows anywhere in each smaller batch. Sizes may agree
    by chance, small integers easily; so several batches are drawn, and `run` should return as much
    as it can (the network's raw outputs too).

    Args:
        run: the production path. Takes row ids, int64 ``[m]``: which probe row, of
            ``draws * full_size`` different ones, stands at each position. Returns the outputs, a
            list of tensors ``[m, ...]``, the same list for each m. A row id stands for everything
            that a row depends on, its noise included. Row r is environment ``r % full_size``.
        full_size: rows in a batch of all environments.
        candidates: sizes to measure, by default `candidate_sizes`; the full size and those above
            it are passed over.
        draws: full batches of probe rows, at least 2 so that there are other batch-mates to try.
            Each row is run once at every size; of many rows, 512 and two batches at least.
        seed: of the random batches.
        suspects: modules to blame if rows aren't independent, as `mixing_modules` finds them.

    Raises:
        PolicyError: if a row's output changes with its batch-mates at the same shape and position,
            or if an output has not one row per input row.
        ValueError: if `draws` is less than 2.

    Example:
        >>> import torch
        >>> probes = torch.randn(16, 3)
        >>> print(calibrate(lambda rows: [probes[rows] * 2], full_size=8, draws=2))
        batches of 1-8 rows agree bit for bit
    """
    if draws < 2:
        raise ValueError(f"expected draws >= 2, got {draws}")
    rng = np.random.default_rng(seed)
    home = np.arange(full_size, dtype=np.int64)

    def marks(rows: Rows) -> Bits:
        outputs = run(rows)
        for output in outputs:
            if output.ndim == 0 or len(output) != len(rows):
                raise PolicyError(
                    f"expected outputs with a row for each of the {len(rows)} input rows, got one "
                    f"of shape {list(output.shape)}"
                )
        return row_marks(outputs)

    reference = np.concatenate([marks(home + draw * full_size) for draw in range(draws)])

    def agrees(rows: Rows) -> bool:
        return np.array_equal(marks(rows), reference[rows])

    def agrees_anywhere(m: int) -> bool:
        """Probe rows in batches of m, at positions and with mates drawn at random."""
        order = rng.permutation(len(reference))[: max(_ROWS_TRIED, 2 * m)]
        return all(agrees(order[start : start + m]) for start in range(0, len(order) - m + 1, m))

    for _ in range(draws):
        other_mates = home + full_size * rng.integers(draws, size=full_size)
        if not agrees(other_mates):
            raise PolicyError(_dependence(suspects))
    if not agrees_anywhere(full_size):
        return InvariantSizes((full_size,), full_size, fixed_rows=True)
    tried = candidate_sizes(full_size) if candidates is None else sorted(set(candidates))
    sizes = [m for m in tried if m < full_size and agrees_anywhere(m)]
    return InvariantSizes((*sizes, full_size), full_size, fixed_rows=False)


def choose_sizes(
    run: Callable[[Rows], list[Tensor]],
    num_envs: int,
    num_rows: int,
    *,
    suspects: Sequence[str] = (),
) -> InvariantSizes:
    """Find the classes of batch sizes that agree bitwise, and choose one to run everything with.

    On one CPU, say, the Nature CNN gives one set of bits for 1 row, one for 2 to 15 and one for 16
    and more. The class chosen is the one that runs the fewest rows on average over all numbers of
    environments that may be ready. A batch costs as much as some rows. The times that it takes have
    no say: they differ from run to run, and the bits must not.

    Args:
        run: see `calibrate`.
        num_envs: rows in a batch of all environments.
        num_rows: different probe rows to compare, as many of them as make whole batches. There
            must be two batches of all environments.
        suspects: see `calibrate`.

    Raises:
        PolicyError: see `calibrate`.
    """

    def measure(size: int) -> InvariantSizes:
        return calibrate(run, size, draws=max(2, num_rows // size), suspects=suspects)

    classes = [measure(num_envs)]
    for size in reversed(candidate_sizes(num_envs)):
        if 4 * size < num_envs:
            break
        if not any(size in known.sizes for known in classes):
            found = measure(size)
            if not found.fixed_rows:  # the smaller batch has no row for each environment
                classes.append(found)
    return min(classes, key=lambda sizes: (sizes.cost(num_envs), sizes.fixed_rows))


def with_larger(
    run: Callable[[Rows], list[Tensor]],
    sizes: InvariantSizes,
    num_envs: int,
    num_rows: int,
    *,
    draws: int = 4,
) -> InvariantSizes:
    """The same and larger sizes that agree with them, up to a batch of all environments.

    Which these are decides on nothing but speed, so that they may differ from learner to learner
    where the sizes that are given do not.

    Args:
        run: see `calibrate`.
        sizes: that agree.
        num_envs: rows of the largest batch.
        num_rows: different probe rows to compare.
        draws: batches of each size to try.

    Example:
        >>> import torch
        >>> probes = torch.randn(16, 3)
        >>> few = InvariantSizes((1, 2), full_size=2, fixed_rows=False)
        >>> print(with_larger(lambda rows: [probes[rows] * 2], few, num_envs=6, num_rows=16))
        batches of 1-6 rows agree bit for bit
    """
    if sizes.fixed_rows:
        return sizes
    rng = np.random.default_rng(0)
    full = sizes.full_size
    starts = range(0, num_rows - full + 1, full)
    home = np.arange(full, dtype=np.int64)
    reference = np.concatenate([row_marks(run(home + start)) for start in starts])

    def agrees(m: int) -> bool:
        batches = (rng.integers(len(reference), size=m) for _ in range(draws))
        return all(np.array_equal(row_marks(run(rows)), reference[rows]) for rows in batches)

    larger = [m for m in candidate_sizes(num_envs) if m > full and agrees(m)]
    agreeing = (*sizes.sizes, *larger)
    return replace(sizes, sizes=agreeing, full_size=agreeing[-1])


def _dependence(suspects: Sequence[str]) -> str:
    blame = f" Suspects: {', '.join(suspects)}." if suspects else ""
    return (
        "The policy's rows aren't independent: at the same batch shape and position, a row's "
        "output changed with the other rows of the batch (or from call to call), so actions would "
        "depend on which environments happen to be ready together."
        f"{blame} Put normalisation layers that use batch statistics in evaluation mode "
        "(policy.eval()), or use one that works row by row (LayerNorm, GroupNorm), and keep no "
        "state in the policy's attributes between calls."
    )
