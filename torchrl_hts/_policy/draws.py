"""Action noise as a pure function of (seed, environment, round, step), and exact draws from it.

`CounterNoise` makes each row's random words (I6). A `WordStream` hands the words of one batch to
distributions, which `bind` makes to draw from it. Only the innermost draw is replaced; transforms,
sums over dimensions and log-probabilities stay TorchRL's.

Axes: m rows of a batch, N environments, T steps of a round, W words per row, A actions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict.nn import (
    CompositeDistribution,
)
from tensordict.nn import distributions as td_dist
from tensordict.nn.distributions import truncated_normal as td_truncated
from torch import Tensor
from torch import distributions as D
from torchrl.modules import distributions as rl_dist
from torchrl.modules.distributions import truncated_normal as rl_truncated

from torchrl_hts.errors import PolicyError

__all__ = [
    "CounterNoise",
    "Uniforms",
    "WordStream",
    "Words",
    "bind",
    "draw_categorical",
    "draw_index",
    "one_hot",
    "uniforms_of",
]

Words = npt.NDArray[np.uint64]
Uniforms = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.floating[Any]]
IndexArray = npt.NDArray[np.int64]

_DOMAIN = 0x4854_5352_4C61_6374  # "HTSRLact": keeps these words apart from other uses of a seed
_MASK_64 = 2**64 - 1
_WORDS_PER_COUNT = 4  # of Philox
_MANY_ROWS = 128  # from which a draw in columns takes less time


class CounterNoise:
    """64-bit noise words, a pure function of (seed, environment index, round, step).

    Philox is a counter-based generator: its key is the seed, its counter starts from the round,
    and no state is carried from call to call.

    Args:
        seed: any integer; its lowest 64 bits count.
        num_envs: N.
        sync_interval: T, the steps per environment and round.
        width: W, the words that one step of one environment needs; may be 0.
        first_env: index of the first of these environments.

    Raises:
        ValueError: if a size is negative.

    Example:
        >>> few = CounterNoise(seed=0, num_envs=2, sync_interval=3, width=1).round(7)
        >>> more = CounterNoise(seed=0, num_envs=5, sync_interval=3, width=1).round(7)
        >>> few.shape, bool((few == more[:2]).all())
        ((2, 3, 1), True)
    """

    def __init__(
        self, seed: int, num_envs: int, sync_interval: int, width: int, first_env: int = 0
    ) -> None:
        self.shape = (num_envs, sync_interval, width)
        self._skipped = first_env * sync_interval * width
        if min(self.shape) < 0:
            raise ValueError(
                f"expected [num_envs, sync_interval, width] >= 0, got {list(self.shape)}"
            )
        key = np.array([seed & _MASK_64, _DOMAIN], dtype=np.uint64)
        self._generator = np.random.Philox(key=key)
        self._start: Any = self._generator.state

    def round(self, round: int) -> Words:
        """The words of round `round` >= 0: uint64 ``[N, T, W]``, environment by environment.

        The first environments' words don't depend on how many environments there are.
        """
        if round < 0:
            raise ValueError(f"expected round >= 0, got {round}")
        # The generator counts up in the two low words of its counter; the round is a high one.
        blocks, extra = divmod(self._skipped, _WORDS_PER_COUNT)
        self._start["state"]["counter"][0] = blocks
        self._start["state"]["counter"][2] = round
        self._generator.state = self._start  # takes a third of making another
        words: Words = self._generator.random_raw(extra + math.prod(self.shape))
        return words[extra:].reshape(self.shape)


def uniforms_of(words: Words) -> Uniforms:
    """Words to float64 inside (0, 1), symmetric about 1/2, every one exact.

    52 bits, not 53: with 53 the largest value would be 1 - 2**-54, which rounds to 1.0.
    """
    return (words >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53


class WordStream:
    """The words of one call of the policy, handed out column by column.

    Args:
        rows: m.
        words: uint64 ``[m, W]``, or what `uniforms_of` makes of them: then there are no seeds. With
            None it only counts, and hands out 0.5 and seed 0: how the width is found.
        device: of the uniforms that are tensors.
    """

    def __init__(self, rows: int, words: Words | Uniforms | None, device: torch.device) -> None:
        self.rows, self.words, self.device = rows, words, device
        self.used = 0

    def _take(self, columns: int) -> slice:
        taken = slice(self.used, self.used + columns)
        self.used += columns
        if self.words is not None and self.used > self.words.shape[1]:
            raise PolicyError(
                f"the policy draws more random numbers per row than the {self.words.shape[1]} of "
                "its trial run. Make the number of draws the same in every call"
            )
        return taken

    def uniform_array(self, shape: tuple[int, ...]) -> Uniforms:
        """The next uniforms, float64 ``[m, ...]``: as many per row as `shape` asks for."""
        if shape[:1] != (self.rows,):
            raise PolicyError(
                f"expected a distribution with a row for each of the {self.rows} observations, "
                f"got one of shape {list(shape)}. Expand its parameters to the batch"
            )
        columns = self._take(math.prod(shape[1:]))
        if self.words is None:
            return np.full(shape, 0.5)
        taken: Any = self.words[:, columns]
        return (taken if taken.dtype.kind == "f" else uniforms_of(taken)).reshape(shape)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """The next uniforms as a tensor on the device; may be the stream's own memory."""
        return torch.from_numpy(self.uniform_array(shape)).to(self.device)

    def seeds(self) -> list[int]:
        """The next word of each row, as a seed."""
        columns = self._take(1)
        return [0] * self.rows if self.words is None else self.words[:, columns.start].tolist()


# --- The draws: from a distribution and uniforms of its batch shape, a sample.


def draw_index(probs: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulated probability exceeds u: int64 of u's shape.

    u times the total is more than 0 and, rounding included, less than the total. So the index is
    below A, and its own probability, without which it would not be the first, is not 0.
    """
    if probs.device.type == "cpu" and probs.dtype != torch.bfloat16:
        # numpy's calls cost a fifth of torch's on arrays as small as these.
        sums = np.cumsum(probs.detach().numpy(), -1, dtype=np.float64)
        return torch.from_numpy(np.asarray(_first_above(sums, u.numpy() * sums[..., -1])))
    cumulated = probs.cumsum(-1, dtype=torch.float64)
    return (cumulated <= u.unsqueeze(-1) * cumulated[..., -1:]).sum(-1)


def _first_above(sums: FloatArray, limit: FloatArray) -> IndexArray:
    """The first index whose sum exceeds the limit: int64 of the limit's shape."""
    index: IndexArray = (sums > limit[..., None]).argmax(-1)
    return index


def draw_categorical(logits: FloatArray, u: FloatArray) -> tuple[IndexArray, FloatArray]:
    """Draw indices with probabilities softmax(logits), as `draw_index` does, and score them.

    What `torch.distributions.Categorical` computes, up to rounding, without making one.

    Args:
        logits: float32 or float64 ``[..., A]``; of rows with a NaN, with +inf, or with -inf alone
            comes nothing but NaN, and numpy's warning, unless `numpy.errstate` keeps it quiet.
        u: float64 ``[...]``.

    Returns:
        The indices, int64 ``[...]``, and their log-probabilities, ``[...]`` of the logits' type.

    Example:
        >>> logits = np.log(np.array([[0.5, 0.25, 0.25]]))
        >>> index, log_prob = draw_categorical(logits, np.array([0.6]))
        >>> int(index[0]), round(float(log_prob[0]), 4)
        (1, -1.3863)
    """
    rows = logits.reshape(-1, logits.shape[-1])
    if len(rows) >= max(_MANY_ROWS, 8 * rows.shape[1]):
        index, score = _draw_in_columns(rows, u.reshape(-1))
        return index.reshape(u.shape), score.reshape(u.shape)
    # Along the first axis, which takes a tenth of the time of many short rows.
    shifted = rows - np.maximum.reduce(np.ascontiguousarray(rows.T))[:, None]
    sums = np.add.accumulate(np.exp(shifted), -1, np.float64)
    total = sums[:, -1]
    index = _first_above(sums, u.reshape(-1) * total)
    # The flat index costs a third of [arange, index].
    score = shifted.take(index + _row_starts(*rows.shape))
    score -= np.log(total).astype(rows.dtype)
    return index.reshape(u.shape), score.reshape(u.shape)


def _draw_in_columns(rows: FloatArray, u: FloatArray) -> tuple[IndexArray, FloatArray]:
    """The same for many rows ``[m, A]``, bit for bit: an operation for each of few actions."""
    columns = np.ascontiguousarray(rows.T)
    columns = columns - np.maximum.reduce(columns)
    sums = np.exp(columns).astype(np.float64)
    for action in range(1, len(sums)):
        sums[action] += sums[action - 1]
    total = sums[-1]
    index: IndexArray = np.add.reduce(sums <= u * total, 0, np.int64)
    score = columns.take(index * len(u) + _row_starts(len(u), 1))
    score -= np.log(total).astype(rows.dtype)
    return index, score


@functools.lru_cache(maxsize=256)
def _row_starts(rows: int, length: int) -> IndexArray:
    """Where each row of ``[rows, length]`` begins, in a flat array; not to be written to."""
    return np.arange(0, rows * length, length)


def one_hot(index: Tensor, length: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Indices ``[...]`` as ``[..., length]`` with a one each."""
    zeros = torch.zeros((*index.shape, length), dtype=dtype, device=index.device)
    return zeros.scatter_(-1, index.unsqueeze(-1), 1)


def _masked(dist: rl_dist.MaskedCategorical, u: Tensor) -> Tensor:
    index = draw_index(dist.probs, u)
    if dist._sparse_mask:
        index = dist._mask.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return index


def _truncated(dist: rl_truncated.TruncatedStandardNormal, u: Tensor) -> Tensor:
    # Its own inverse over its own range of probabilities, as in its rsample; clamped to the bounds.
    u = u.clamp(dist._dtype_min_gt_0, dist._dtype_max_lt_1)
    sample: Tensor = dist.icdf(u.to(dist.a.dtype))
    return sample


def _normal(dist: D.Normal, u: Tensor) -> Tensor:
    standard: Tensor = torch.special.ndtri(u)
    return dist.loc + standard.to(dist.loc.dtype) * dist.scale


_DRAWS: dict[type[D.Distribution], Callable[[Any, Tensor], Tensor]] = {
    D.Bernoulli: lambda dist, u: (u < dist.probs).to(dist.probs.dtype),
    D.Categorical: lambda dist, u: draw_index(dist.probs, u),
    D.Normal: _normal,
    D.OneHotCategorical: lambda dist, u: one_hot(
        draw_index(dist.probs, u), dist.probs.shape[-1], dist.probs.dtype
    ),
    rl_dist.MaskedCategorical: _masked,
    rl_dist.MaskedOneHotCategorical: lambda dist, u: one_hot(_masked(dist, u), dist.num_samples),
    rl_dist.OneHotCategorical: lambda dist, u: one_hot(draw_index(dist.probs, u), dist.num_samples),
    td_dist.OneHotCategorical: lambda dist, u: one_hot(
        draw_index(dist.probs, u), dist.probs.shape[-1]
    ),
    rl_truncated.TruncatedStandardNormal: _truncated,
    td_truncated.TruncatedStandardNormal: _truncated,
}
# Distributions that draw only through others: those others.
_PARTS: dict[type[D.Distribution], Callable[[Any], Iterable[D.Distribution]]] = {
    CompositeDistribution: lambda dist: dist.dists.values(),
    D.Independent: lambda dist: (dist.base_dist,),
    D.TransformedDistribution: lambda dist: (dist.base_dist,),
    rl_dist.Delta: lambda dist: (),
    td_dist.Delta: lambda dist: (),
}


@functools.cache
def _registered(kind: type[Any]) -> type[D.Distribution] | None:
    """The class in the tables above whose way of drawing `kind` has, not overridden; or None."""
    for base in kind.__mro__:
        if base in _DRAWS or base in _PARTS:
            same = kind.sample is base.sample and kind.rsample is base.rsample
            return base if same else None
    return None


_ONE = torch.Size()


def bind(dist: D.Distribution, noise: WordStream) -> bool:
    """Make this one distribution object draw from `noise`; False if there is no exact way."""
    kind: Any = _registered(type(dist))  # type: ignore[arg-type]
    if kind is None:
        return False
    if kind in _PARTS:
        return all(bind(part, noise) for part in _PARTS[kind](dist))
    draw = _DRAWS[kind]

    def sample(sample_shape: torch.Size = _ONE) -> Tensor:
        if sample_shape:  # many samples, for an estimate: left to torch's generator, and noticed
            stock = type(dist).rsample if dist.has_rsample else type(dist).sample
            return stock(dist, sample_shape)
        return draw(dist, noise.uniform(dist.batch_shape))

    vars(dist).update(sample=sample, rsample=sample)
    return True
