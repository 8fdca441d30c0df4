"""Which batch sizes agree bit for bit: each branch of the calibration, then real networks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrl.modules import MLP, ConvNet

from torchrl_hts._policy.invariance import (
    InvariantSizes,
    calibrate,
    candidate_sizes,
    choose_sizes,
)
from torchrl_hts._policy.module_checks import mixing_modules
from torchrl_hts._policy.row_bits import row_bits
from torchrl_hts.errors import PolicyError

N = 8


pytestmark = pytest.mark.usefixtures("seeded_thread")


# --- the sizes


@st.composite
def _sizes(draw: st.DrawFn, full: int | None = None) -> InvariantSizes:
    full = full or draw(st.integers(1, 80))
    smaller = draw(st.sets(st.integers(1, full)))
    fixed = draw(st.booleans())
    sizes = (full,) if fixed else tuple(sorted(smaller | {full}))
    return InvariantSizes(sizes, full, fixed)


@given(_sizes(), st.data())
def test_pad_is_the_smallest_size_that_holds_the_rows(sizes: InvariantSizes, data: Any) -> None:
    k = data.draw(st.integers(1, sizes.full_size))
    m = sizes.pad(k)
    assert m in sizes.sizes
    assert m >= k
    assert not [size for size in sizes.sizes if k <= size < m]
    for outside in (0, sizes.full_size + 1):
        with pytest.raises(ValueError, match=f"expected 1 to {sizes.full_size} rows"):
            sizes.pad(outside)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(*[_sizes(n)] * 3)))
def test_intersect_serves_every_actor(three: tuple[InvariantSizes, ...]) -> None:
    a, b, c = three
    both = a.intersect(b)
    assert both == b.intersect(a)
    assert both.intersect(c) == a.intersect(b.intersect(c))
    assert a.intersect(a) == a
    assert set(both.sizes) <= set(a.sizes) & set(b.sizes)
    assert both.fixed_rows == (a.fixed_rows or b.fixed_rows)
    if not both.fixed_rows:
        assert set(both.sizes) == set(a.sizes) & set(b.sizes)


def test_intersect_needs_the_same_full_size() -> None:
    with pytest.raises(ValueError, match="for 4 and for 8 rows"):
        InvariantSizes((4,), 4, False).intersect(InvariantSizes((8,), 8, False))


@pytest.mark.parametrize("how", [{"transposed": True}, {"packed": True}, {"blocked": True}])
def test_intersect_needs_layers_that_run_alike(how: dict[str, bool]) -> None:
    (said,) = how
    said = said.removesuffix("ed")
    changed = InvariantSizes((4, 8), 8, False, **how)
    with pytest.raises(ValueError, match=f"{said}.*, and another batches of 4, 8 rows agree bit"):
        changed.intersect(InvariantSizes((4, 8), 8, False))
    both = changed.intersect(InvariantSizes((2, 8), 8, False, **how))
    assert both == InvariantSizes((8,), 8, False, **how)


@given(st.integers(1, 3000))
def test_candidates_ascend_to_the_full_size(full: int) -> None:
    sizes = candidate_sizes(full)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == full
    assert set(range(1, min(full, 16) + 1)) <= set(sizes)
    assert all(b - a <= max(16, a / 8) for a, b in pairwise(sizes))
    assert all(size % 4 == 0 for size in sizes[:-1] if size > 16)
    assert all(size % 16 == 0 for size in sizes[:-1] if size > 64)


def test_of_very_many_rows_few_sizes_are_tried() -> None:
    """And of the smaller ones as many rows as of few."""
    assert len(candidate_sizes(16 * 1024)) < 100
    ran: dict[int, int] = {}

    def run(rows: np.ndarray) -> list[Tensor]:
        ran[len(rows)] = ran.get(len(rows), 0) + 1
        return [torch.from_numpy(rows)]

    found = choose_sizes(run, 16 * 1024, 64)
    assert found.sizes == candidate_sizes(16 * 1024)
    assert ran[1] == 512
    assert ran[8 * 1024] == 2


@pytest.mark.parametrize(
    ("sizes", "full", "fixed"),
    [((), 4, False), ((4, 2), 4, False), ((2, 2, 4), 4, False), ((2,), 4, False),
     ((0, 4), 4, False), ((2, 4), 4, True), ((4, 8), 4, False)],
)  # fmt: skip
def test_impossible_sizes_are_refused(sizes: tuple[int, ...], full: int, fixed: bool) -> None:
    with pytest.raises(ValueError, match=r"expected ascending|fixed rows"):
        InvariantSizes(sizes, full, fixed)


def test_sizes_print_as_a_report() -> None:
    assert str(InvariantSizes((1, 4, 5, 6, 16), 16, False)) == (
        "batches of 1, 4-6, 16 rows agree bit for bit"
    )
    assert "each environment in its own row" in str(InvariantSizes((16,), 16, True))
    assert str(InvariantSizes((4, 8), 8, False, blocked=True)) == (
        "batches of 4, 8 rows agree bit for bit, products in blocks of rows"
    )
    assert str(InvariantSizes((2, 3), 3, False, packed=True, transposed=True)) == (
        "batches of 2-3 rows agree bit for bit, large layers packed, linear layers transposed"
    )


# --- the calibration, on functions that break invariance on purpose


class _Fake:
    """A policy of one output: a function of the row alone, plus what `fault` adds to it."""

    def __init__(self, fault: Callable[[np.ndarray], Any] = lambda rows: 0, draws: int = 4) -> None:
        self.fault, self.known = fault, draws * N
        self.shapes: list[int] = []

    def __call__(self, rows: np.ndarray) -> list[Tensor]:
        assert rows.dtype == np.int64
        assert rows.min() >= 0
        assert rows.max() < self.known
        assert len(set(rows.tolist())) == len(rows)
        self.shapes.append(len(rows))
        value = torch.from_numpy(rows.astype(np.float32))
        return [value + torch.as_tensor(self.fault(rows)), torch.ones(len(rows), 3)]


def test_all_sizes_agree() -> None:
    fake = _Fake()
    assert calibrate(fake, N) == InvariantSizes(tuple(range(1, N + 1)), N, False)
    assert fake.shapes.count(1) >= N
    assert min(fake.shapes.count(m) for m in range(1, N)) >= 4


def test_sizes_that_differ_are_left_out() -> None:
    fake = _Fake(lambda rows: 1e-3 if len(rows) in (1, 2, 3, 5) else 0)
    assert calibrate(fake, N).sizes == (4, 6, 7, 8)


def test_only_candidates_are_tried() -> None:
    fake = _Fake()
    assert calibrate(fake, N, (6, 2, 2, 8, 99)).sizes == (2, 6, 8)
    assert set(fake.shapes) == {2, 6, 8}
    assert calibrate(_Fake(), N, ()).sizes == (N,)


def test_a_position_that_matters_in_a_smaller_batch_leaves_its_size_out() -> None:
    def last_of_six(rows: np.ndarray) -> np.ndarray:
        return np.float32(1e-3) * ((np.arange(len(rows)) == 5) & (len(rows) == 6))

    assert calibrate(_Fake(last_of_six), N).sizes == (1, 2, 3, 4, 5, 7, 8)


def test_a_position_that_matters_in_the_full_batch_fixes_the_rows() -> None:
    def by_position(rows: np.ndarray) -> np.ndarray:
        return np.arange(len(rows), dtype=np.float32)

    assert calibrate(_Fake(by_position), N) == InvariantSizes((N,), N, True)


def test_batch_mates_that_matter_are_an_error() -> None:
    with pytest.raises(PolicyError, match=r"aren't independent.*Suspects: 1 \(BatchNorm1d\)\."):
        calibrate(_Fake(lambda rows: float(rows.sum())), N, suspects=["1 (BatchNorm1d)"])


def test_batch_mates_that_matter_to_one_row_are_an_error() -> None:
    def first_sees_last(rows: np.ndarray) -> np.ndarray:
        return np.float32(rows[-1]) * (np.arange(len(rows)) == 0)

    with pytest.raises(PolicyError, match="aren't independent"):
        calibrate(_Fake(first_sees_last), N)


def test_outputs_that_change_from_call_to_call_are_an_error() -> None:
    calls = iter(range(1000))
    for full in (1, N):
        with pytest.raises(PolicyError, match="from call to call"):
            calibrate(lambda rows: [torch.full((len(rows),), next(calls))], full)


def test_nan_agrees_with_itself() -> None:
    assert calibrate(_Fake(lambda rows: float("nan")), N).sizes[0] == 1


def test_outputs_need_a_row_for_each_input() -> None:
    with pytest.raises(PolicyError, match=r"8 input rows, got one of shape \[1\]"):
        calibrate(lambda rows: [torch.zeros(1)], N)
    with pytest.raises(PolicyError, match=r"got one of shape \[\]"):
        calibrate(lambda rows: [torch.tensor(0.0)], N)


def test_one_draw_has_no_other_batch_mates() -> None:
    with pytest.raises(ValueError, match="draws >= 2"):
        calibrate(_Fake(), N, draws=1)


def test_one_environment() -> None:
    assert calibrate(lambda rows: [torch.from_numpy(rows)], 1) == InvariantSizes((1,), 1, False)


# --- real networks


def _runner(net: Callable[[Tensor], Any], *shape: int, full: int, draws: int = 4) -> Any:
    probes = torch.randn(draws * full, *shape)

    @torch.inference_mode()
    def run(rows: np.ndarray) -> list[Tensor]:
        out = net(probes[torch.from_numpy(rows)])
        return list(out) if isinstance(out, tuple) else [out]

    return run


def _holds(sizes: InvariantSizes, net: Callable[[Tensor], Any], *shape: int) -> None:
    """Fresh inputs, padded as an actor pads, against each row in the full batch."""
    full = sizes.full_size
    rows = torch.randn(full, *shape)
    with torch.inference_mode():
        expected = net(rows)
        for k in range(1, full + 1):
            m = sizes.pad(k)
            chosen = torch.randperm(full)[:k]
            if sizes.fixed_rows:
                batch, at = torch.randn(full, *shape), chosen
            else:
                batch, at = torch.randn(m, *shape), torch.arange(k)
            batch[at] = rows[chosen]
            np.testing.assert_array_equal(row_bits([net(batch)[at]]), row_bits([expected[chosen]]))


def test_mlp() -> None:
    net = MLP(in_features=8, out_features=4, num_cells=[64, 64])
    sizes = calibrate(_runner(net, 8, full=16), 16)
    _holds(sizes, net, 8)


def test_nature_cnn() -> None:
    cnn = ConvNet(in_features=4, num_cells=[32, 64, 64], kernel_sizes=[8, 4, 3], strides=[4, 2, 1])
    net = nn.Sequential(cnn, nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6))
    candidates = (1, 2, 3, 4, 5, 6)
    sizes = calibrate(_runner(net, 4, 84, 84, full=8, draws=2), 8, candidates, draws=2)
    _holds(sizes, net, 4, 84, 84)


def test_lstm() -> None:
    lstm = nn.LSTM(6, 32, batch_first=True)

    def net(rows: Tensor) -> Tensor:
        out, (h, c) = lstm(rows[:, None, :])
        return torch.cat([out[:, 0], h[0], c[0]], -1)

    sizes = calibrate(_runner(net, 6, full=16), 16)
    _holds(sizes, net, 6)


def test_batch_normalisation_in_training_mode_is_named() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False))
    run = _runner(net, 6, full=N)
    with pytest.raises(PolicyError, match=r"Suspects: 1 \(BatchNorm1d\)"):
        calibrate(run, N, suspects=mixing_modules(net))


def test_mixing_modules() -> None:
    assert mixing_modules(nn.BatchNorm2d(3)) == ["policy (BatchNorm2d)"]
    assert mixing_modules(nn.BatchNorm2d(3).eval()) == []
    without = nn.BatchNorm2d(3, track_running_stats=False).eval()
    assert mixing_modules(without) == ["policy (BatchNorm2d)"]
    assert mixing_modules(nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3))) == []


class TestChoice:
    """Which class of sizes everything is run with."""

    @staticmethod
    def classes(*groups: set[int], moving: set[int] = frozenset()) -> Callable[[Any], Any]:  # type: ignore[assignment]
        """A run whose bits depend on the size's group, and on the position where it is moving."""

        def run(rows: np.ndarray) -> list[Tensor]:
            size = len(rows)
            group = next(k for k, sizes in enumerate(groups) if size in sizes)
            position = np.arange(size) if size in moving else 0
            return [torch.as_tensor(rows * 1000 + group * 100 + position)]

        return run

    def test_the_class_that_runs_the_fewest_rows_is_chosen(self) -> None:
        run = self.classes({1}, set(range(2, 16)), {16})
        assert choose_sizes(run, 16, 64).sizes == tuple(range(2, 16))

    def test_a_full_batch_is_better_than_many_small_ones(self) -> None:
        assert choose_sizes(self.classes({1, 2}, {3, 4, 5, 6, 7}, {8}), 8, 64).sizes == (
            3,
            4,
            5,
            6,
            7,
        )
        run = self.classes({1, 2}, set(range(3, 9)), moving=set(range(3, 9)))
        chosen = choose_sizes(run, 8, 64)
        assert chosen.fixed_rows
        assert chosen.sizes == (8,)

    def test_one_class_of_all_sizes(self) -> None:
        assert choose_sizes(self.classes(set(range(1, 9))), 8, 64).sizes == tuple(range(1, 9))

    @given(st.integers(1, 64), st.integers(1, 200))
    def test_split_keeps_rows_and_order(self, largest: int, count: int) -> None:
        sizes = InvariantSizes((largest,), largest, fixed_rows=False)
        parts = sizes.split(range(count))
        assert [row for part in parts for row in part] == list(range(count))
        assert max(map(len, parts)) <= largest
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
