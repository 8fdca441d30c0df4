"""Noise from a counter, and exact sampling from it (I6)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule
from tensordict.nn import distributions as td_dist
from torch import Tensor
from torch import distributions as D
from torchrl.envs.utils import ExplorationType
from torchrl.modules import distributions as rl_dist

from torchrl_hts._policy.counter_policy import CounterPolicy
from torchrl_hts._policy.draws import CounterNoise, draw_categorical, draw_index, uniforms_of

RANDOM = ExplorationType.RANDOM


pytestmark = pytest.mark.usefixtures("seeded_thread")


# --- the counter


def test_words_do_not_depend_on_the_number_of_environments() -> None:
    few = CounterNoise(3, num_envs=4, sync_interval=5, width=2).round(9)
    many = CounterNoise(3, num_envs=16, sync_interval=5, width=2).round(9)
    assert few.shape == (4, 5, 2)
    assert few.dtype == np.uint64
    np.testing.assert_array_equal(few, many[:4])


@pytest.mark.parametrize(("interval", "width"), [(5, 2), (3, 1), (1, 1), (7, 3), (2, 0)])
def test_some_environments_have_the_words_that_they_have_among_all(
    interval: int, width: int
) -> None:
    everybody = CounterNoise(3, 8, interval, width).round(9)
    for first in range(8):
        own = CounterNoise(3, 8 - first, interval, width, first_env=first)
        np.testing.assert_array_equal(own.round(9), everybody[first:])


def test_words_are_a_pure_function_of_seed_and_round() -> None:
    noise = CounterNoise(3, 4, 5, 2)
    later, first = noise.round(7), noise.round(0)
    np.testing.assert_array_equal(noise.round(7), later)
    np.testing.assert_array_equal(CounterNoise(3, 4, 5, 2).round(0), first)
    apart = [first, later, noise.round(1), CounterNoise(4, 4, 5, 2).round(0)]
    assert len(np.unique(np.concatenate(apart))) == 4 * first.size


def test_words_stay_the_same_from_release_to_release() -> None:
    words = CounterNoise(1, 1, 1, 2).round(2).ravel().tolist()
    assert words == [4397882524079514599, 8048335461505833233]


def test_any_integer_is_a_seed_and_width_may_be_zero() -> None:
    assert CounterNoise(-1, 2, 3, 0).round(0).shape == (2, 3, 0)
    assert CounterNoise(2**80, 2, 3, 1).round(2**40).shape == (2, 3, 1)
    with pytest.raises(ValueError, match="round >= 0"):
        CounterNoise(0, 1, 1, 1).round(-1)
    with pytest.raises(ValueError, match=">= 0, got"):
        CounterNoise(0, -1, 1, 1)


def test_uniforms_lie_strictly_inside_and_are_symmetric() -> None:
    low, high = uniforms_of(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert 0.0 < low < high < 1.0
    assert low == 1.0 - high


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-9, 0.1, 1.0, 3.0]), min_size=1, max_size=9),
    word=st.one_of(st.sampled_from([0, 2**64 - 1, 2**63]), st.integers(0, 2**64 - 1)),
)
def test_an_index_never_has_probability_zero(weights: list[float], word: int) -> None:
    weights[len(weights) // 2] = 1.0
    probs = torch.tensor([weights])
    probs = probs / probs.sum()
    u = torch.from_numpy(uniforms_of(np.array([word], dtype=np.uint64)))
    index = int(draw_index(probs, u))
    assert 0 <= index < len(weights)
    assert probs[0, index] > 0


def test_rare_actions_are_not_rounded_away() -> None:
    probs = torch.tensor([0.9, 1e-9, 1e-9, 1e-9, 0.1]).expand(4, 5)
    start = probs[0, 0].double()
    total = probs[0].double().sum()
    u = torch.stack([start - 1e-10, start + 0.5e-9, start + 2.5e-9, start + 3.5e-9]) / total
    assert draw_index(probs, u).tolist() == [0, 1, 3, 4]


# --- each distribution against its own cumulative distribution function or probabilities

ROWS = 4000
LOGITS = torch.tensor([0.3, -1.0, -float("inf"), 2.0, 0.0])
MASK = torch.tensor([True, False, True, True, True])


def _rows(*values: float) -> Tensor:
    return torch.tensor(values).expand(ROWS, len(values)).clone()


def _ks(samples: Tensor, cdf: Callable[[Tensor], Tensor]) -> None:
    """Kolmogorov-Smirnov, at a level of about one in a thousand."""
    x = samples.double().sort().values
    grid = torch.arange(len(x) + 1, dtype=torch.float64) / len(x)
    below = cdf(x)
    distance = torch.maximum((grid[1:] - below).max(), (below - grid[:-1]).max())
    assert distance < 1.95 / len(x) ** 0.5


def _chi2(index: Tensor, probs: Tensor) -> None:
    """Chi-square over the categories, none of probability 0 drawn."""
    counts = torch.bincount(index.flatten(), minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0].double() * index.numel()
    free = len(expected) - 1
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    assert statistic <= free + 4 * (2 * free) ** 0.5


def _draw(distribution_class: Any, kwargs: dict[str, Any] | None = None, **params: Tensor) -> Any:
    """The policy, and a sample for each row drawn through it; checks the log-probabilities."""
    module = ProbabilisticTensorDictModule(
        in_keys=list(params),
        out_keys=["action"],
        distribution_class=distribution_class,
        distribution_kwargs=kwargs or {},
        return_log_prob=True,
    )
    policy = CounterPolicy(module, RANDOM)
    rows = len(next(iter(params.values())))
    td = TensorDict(params, [rows])
    policy.prepare(td)
    assert not policy.row_by_row
    words = CounterNoise(5, rows, 1, policy.width).round(0)[:, 0]
    out = policy(td.copy(), words)
    expected = module.get_dist(td).log_prob(out["action"])
    if distribution_class in (D.Categorical, D.Normal, rl_dist.IndependentNormal):  # in numpy
        torch.testing.assert_close(out["action_log_prob"], expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(out["action_log_prob"], expected)
    assert expected.isfinite().all()
    return policy, out["action"]


def test_categorical() -> None:
    logits = LOGITS.expand(ROWS, 5)
    policy, action = _draw(D.Categorical, logits=logits)
    assert policy.width == 1
    _chi2(action, LOGITS.softmax(-1))
    _, again = _draw(D.Categorical, probs=LOGITS.softmax(-1).expand(ROWS, 5))
    assert torch.equal(action, again)


@pytest.mark.parametrize("kind", [rl_dist.OneHotCategorical, td_dist.OneHotCategorical])
def test_one_hot_categorical(kind: Any) -> None:
    _, action = _draw(kind, logits=LOGITS.expand(ROWS, 5))
    assert action.dtype == kind(logits=LOGITS.expand(ROWS, 5)).sample().dtype
    assert (action.sum(-1) == 1).all()
    _chi2(action.argmax(-1), LOGITS.softmax(-1))


def test_torch_one_hot_categorical() -> None:
    _, action = _draw(D.OneHotCategorical, logits=LOGITS.expand(ROWS, 5))
    assert action.dtype == torch.float32
    _chi2(action.argmax(-1), LOGITS.softmax(-1))


def test_masked_categorical() -> None:
    logits, mask = LOGITS.nan_to_num(neginf=1.0), MASK
    probs = logits.masked_fill(~mask, -float("inf")).softmax(-1)
    params = {"logits": logits.expand(ROWS, 5), "mask": mask.expand(ROWS, 5)}
    _, action = _draw(rl_dist.MaskedCategorical, **params)
    _chi2(action, probs)
    _, one_hot = _draw(rl_dist.MaskedOneHotCategorical, **params)
    assert torch.equal(one_hot.argmax(-1), action)


def test_masked_categorical_by_indices() -> None:
    logits = LOGITS.nan_to_num(neginf=1.0)
    indices = MASK.nonzero()[:, 0].expand(ROWS, 4)
    _, action = _draw(rl_dist.MaskedCategorical, logits=logits.expand(ROWS, 5), indices=indices)
    _chi2(action, logits.masked_fill(~MASK, -float("inf")).softmax(-1))


def test_ordinal() -> None:
    scores = torch.tensor([0.4, -0.2, 0.9])
    _, action = _draw(rl_dist.Ordinal, scores=scores.expand(ROWS, 3))
    _chi2(action, rl_dist.Ordinal(scores).probs)
    _, one_hot = _draw(rl_dist.OneHotOrdinal, scores=scores.expand(ROWS, 3))
    assert torch.equal(one_hot.argmax(-1), action)


def test_multi_discrete() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)]).expand(ROWS, 2, 5)
    policy, action = _draw(
        lambda logits: D.Independent(D.Categorical(logits=logits), 1), logits=logits
    )
    assert policy.width == 2
    _chi2(action[:, 0], LOGITS.softmax(-1))
    _chi2(action[:, 1], LOGITS.flip(0).softmax(-1))
    _chi2(
        5 * action[:, 0] + action[:, 1],
        logits[0].softmax(-1)[0].outer(logits[0].softmax(-1)[1]).flatten(),
    )


@pytest.mark.parametrize("independent", [False, True])
def test_bernoulli(independent: bool) -> None:
    def kind(probs: Tensor) -> D.Distribution:
        dist = D.Bernoulli(probs)
        return D.Independent(dist, 1) if independent else dist

    probs = [0.0, 0.2, 0.7, 1.0]
    policy, action = _draw(kind, probs=_rows(*probs))
    assert policy.width == 4
    assert action.dtype == torch.float32
    for column, p in enumerate(probs):
        _chi2(action[:, column].long(), torch.tensor([1 - p, p]))


@pytest.mark.parametrize("kind", [D.Normal, rl_dist.IndependentNormal])
def test_normal(kind: Any) -> None:
    policy, action = _draw(kind, loc=_rows(1.0, -2.0), scale=_rows(0.1, 3.0))
    assert policy.width == 2
    _ks(action[:, 0], D.Normal(1.0, 0.1).cdf)
    _ks(action[:, 1], D.Normal(-2.0, 3.0).cdf)
    tails = (((action - _rows(1.0, -2.0)) / _rows(0.1, 3.0)).abs() > 3).sum()
    assert 8 < tails < 40  # 21.6 expected
    _ks((action[:, 0] - 1) / 0.1 + (action[:, 1] + 2) / 3, D.Normal(0.0, 2**0.5).cdf)


def test_tanh_normal() -> None:
    module = partial(rl_dist.TanhNormal, low=-2.0, high=4.0)
    policy = CounterPolicy(
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=module),
        RANDOM,
    )
    td = TensorDict({"loc": _rows(0.5), "scale": _rows(0.7)}, [ROWS])
    policy.prepare(td)
    action = policy(td, CounterNoise(0, ROWS, 1, 1).round(0)[:, 0])["action"]
    _ks(((action[:, 0] - 1) / 3).atanh(), D.Normal(0.5, 0.7).cdf)


def test_log_normal() -> None:
    _, action = _draw(D.LogNormal, loc=_rows(0.5), scale=_rows(0.7))
    _ks(action[:, 0].log(), D.Normal(0.5, 0.7).cdf)


@pytest.mark.parametrize("kind", [rl_dist.TruncatedNormal, td_dist.TruncatedNormal])
def test_truncated_normal(kind: Any) -> None:
    bounds = {"low": -1.0, "high": 0.5}
    params = {"loc": _rows(0.2, -3.0, 40.0), "scale": _rows(0.5, 0.4, 0.3)}
    if kind is td_dist.TruncatedNormal:
        bounds = {"a": -1.0, "b": 0.5}
    policy, action = _draw(kind, bounds, **params)
    assert policy.width == 3
    assert ((action >= -1.0) & (action <= 0.5)).all()
    base = D.Normal(torch.tensor(0.2).double(), 0.5)
    low, high = base.cdf(torch.tensor(-1.0)), base.cdf(torch.tensor(0.5))
    _ks(action[:, 0], lambda x: (base.cdf(x) - low) / (high - low))


@pytest.mark.parametrize("kind", [rl_dist.Delta, td_dist.Delta, rl_dist.TanhDelta])
def test_delta(kind: Any) -> None:
    module = ProbabilisticTensorDictModule(["param"], ["action"], distribution_class=kind)
    policy = CounterPolicy(module, RANDOM)
    td = TensorDict({"param": _rows(0.3, -0.4)}, [ROWS])
    policy.prepare(td)
    assert (policy.width, policy.row_by_row) == (0, False)
    action = policy(td.copy(), CounterNoise(0, ROWS, 1, 0).round(0)[:, 0])["action"]
    assert torch.equal(action, kind(td["param"]).sample())


def test_any_other_distribution() -> None:
    policy, action = _draw(D.Beta, concentration1=_rows(1.0)[:500], concentration0=_rows(3.0)[:500])
    assert policy.width == 1
    _ks(action[:, 0], lambda x: 1 - (1 - x) ** 3)


# --- in numpy


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 1), (2, 0, 6)])
def test_draw_categorical_is_the_distribution(dtype: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    logits = (10 * rng.standard_normal(shape)).astype(dtype)
    u = rng.random(shape[:-1])
    index, log_prob = draw_categorical(logits, u)
    exact = D.Categorical(logits=torch.from_numpy(logits).double())
    assert torch.equal(torch.from_numpy(index), draw_index(exact.probs, torch.from_numpy(u)))
    assert log_prob.dtype == dtype
    assert index.dtype == np.int64
    expected = exact.log_prob(torch.from_numpy(index)).numpy()
    np.testing.assert_allclose(log_prob, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_actions", [1, 4, 60])
def test_many_rows_are_drawn_with_the_bits_of_few(dtype: Any, num_actions: int) -> None:
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((500, num_actions))).astype(dtype)
    logits[7], logits[8], logits[9, 0] = np.nan, -np.inf, np.inf
    u = rng.random(500)
    with np.errstate(invalid="ignore"):
        index, score = draw_categorical(logits, u)
        few = [draw_categorical(logits[at : at + 8], u[at : at + 8]) for at in range(0, 500, 8)]
    np.testing.assert_array_equal(index, np.concatenate([each[0] for each in few]))
    np.testing.assert_array_equal(score, np.concatenate([each[1] for each in few]))


def test_draw_categorical_never_draws_the_impossible() -> None:
    logits = np.array([[-np.inf, 0.0, -np.inf, 3.0, -np.inf]] * 2, np.float32)
    index, log_prob = draw_categorical(logits, np.array([2.0**-53, 1 - 2.0**-53]))
    assert index.tolist() == [1, 3]
    np.testing.assert_allclose(log_prob, [-3.0485874, -0.0485874], rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_draw_categorical_shows_bad_logits_in_the_log_prob(bad: float) -> None:
    rows = np.array([[0.0, bad], [0.0, 0.0], [-np.inf, -np.inf]], np.float32)
    with np.errstate(invalid="ignore"):
        _, log_prob = draw_categorical(rows, np.full(3, 0.25))
    assert np.isnan(log_prob).tolist() == [True, False, True]
