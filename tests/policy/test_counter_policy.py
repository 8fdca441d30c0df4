"""Policies that draw from a counter: each row is a function of its input and its words (I6)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from probe import takes_steps
from sampled_policies import (
    CASES,
    LOC_SCALE,
    RANDOM,
    Case,
    M,
    bits_of,
    make_actor,
    make_batch,
    make_net,
    prepared,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ConsistentDropoutModule

from torchrl_hts._policy.counter_policy import CounterPolicy
from torchrl_hts._policy.draws import CounterNoise, uniforms_of
from torchrl_hts.errors import PolicyError

pytestmark = pytest.mark.usefixtures("seeded_thread")


each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@each_case
def test_prepare_finds_how_a_policy_draws(case: Case) -> None:
    policy, td, words = prepared(case)
    assert (policy.width, policy.row_by_row) == (case.width, case.row_by_row)
    assert takes_steps(policy) == case.in_steps
    out = policy(td.copy(), words)
    missing = [key for key in policy.policy.out_keys if key not in out.keys(True)]
    assert not missing


@each_case
def test_a_row_is_a_function_of_its_input_and_words(case: Case) -> None:  # I6
    policy, td, words = prepared(case)
    out = policy(td.copy(), words)
    policy(td.copy(), words[::-1].copy())
    assert bits_of(policy(td.copy(), words)) == bits_of(out)
    order = torch.randperm(M)
    moved = policy(td[order], words[order.numpy()])
    assert bits_of(moved) == bits_of(out[order])


@each_case
def test_the_words_decide(case: Case) -> None:
    policy, td, _ = prepared(case)
    noise = CounterNoise(1, M, 1, case.width)
    draws = [bits_of(policy(td.copy(), noise.round(round_)[:, 0])) for round_ in range(8)]
    assert any(draw != draws[0] for draw in draws) == (case.width > 0)


@each_case
def test_global_generators_and_the_policy_are_left_alone(case: Case) -> None:
    policy = case.make()
    attributes = [set(vars(module)) for module in policy.modules()]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    counter_policy = CounterPolicy(policy, RANDOM)
    td = make_batch(policy)
    torch.set_rng_state(before[0])
    counter_policy.prepare(td)
    counter_policy(td, CounterNoise(1, M, 1, counter_policy.width).round(0)[:, 0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    assert [set(vars(module)) for module in policy.modules()] == attributes


@pytest.mark.parametrize("name", ["categorical", "one-hot", "normal", "tensordict", "beta"])
def test_log_probs_are_the_distribution_s(name: str) -> None:
    policy, td, words = prepared(CASES[name])
    out = policy(td.copy(), words)
    with torch.inference_mode():
        expected = policy.policy.get_dist(td).log_prob(out["action"])
    if name != "one-hot":  # scored in batches of one row, or in numpy
        torch.testing.assert_close(out["action_log_prob"], expected)
    else:
        assert torch.equal(out["action_log_prob"], expected)


def test_tanh_normal_is_scored_as_torchrl_scores_it() -> None:
    policy, td, words = prepared(CASES["tanh-normal"])
    out = policy(td.copy(), words)
    with torch.inference_mode():
        dist = policy.policy.get_dist(td)
    preimage = (
        torch.special.ndtri(torch.from_numpy(uniforms_of(words))).float() * dist.scale + dist.loc
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.base_dist, "rsample", lambda shape: preimage)
        action, log_prob = dist.rsample_and_log_prob()
    torch.testing.assert_close(out["action"], action)
    torch.testing.assert_close(out["action_log_prob"], log_prob)


def test_composite_parts_have_words_of_their_own() -> None:
    policy, td, words = prepared(CASES["composite"])
    out = policy(td.copy(), words)
    other = words.copy()
    other[:, 1:] += np.uint64(2**60)
    changed = policy(td.copy(), other)
    assert torch.equal(out["move"], changed["move"])
    assert (out["aim"] != changed["aim"]).all()
    assert {"move_log_prob", "aim_log_prob"} <= set(out.keys())


@pytest.mark.parametrize("name", ["noisy", "epsilon-greedy, masked"])
def test_rows_run_alone_are_the_same_in_any_batch(name: str) -> None:
    policy, td, words = prepared(CASES[name])
    out = policy(td.copy(), words)
    for k in (1, 3):
        assert bits_of(policy(td[:k], words[:k])) == bits_of(out[:k])


def test_deterministic_exploration_runs_the_policy_as_it_is() -> None:
    for name in ("categorical", "tanh-normal", "composite", "beta", "recurrent"):
        kind = ExplorationType.DETERMINISTIC
        policy = CounterPolicy(CASES[name].make(), kind)
        td = make_batch(policy.policy)
        policy.prepare(td)
        assert policy.width == 0
        with set_exploration_type(kind), torch.inference_mode():
            stock = policy.policy(td.copy())
        assert bits_of(policy(td.copy(), np.zeros((M, 0), np.uint64))) == bits_of(stock)


def test_a_mean_estimated_from_samples_is_seeded_row_by_row() -> None:
    policy = CounterPolicy(CASES["tanh-normal"].make(), ExplorationType.MEAN)
    td = make_batch(policy.policy)
    policy.prepare(td)
    assert (policy.width, policy.row_by_row) == (1, True)
    words = CounterNoise(1, M, 1, 1).round(0)[:, 0]
    assert bits_of(policy(td.copy(), words)) == bits_of(policy(td.copy(), words))


def test_a_subclass_that_draws_its_own_way_is_not_taken_for_its_base() -> None:
    class Shifted(D.Normal):
        def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
            return super().rsample(sample_shape) + 100

    policy = CounterPolicy(make_actor(Shifted, LOC_SCALE, make_net(4, True)), RANDOM)
    td = make_batch(policy.policy)
    policy.prepare(td)
    out = policy(td, CounterNoise(1, M, 1, policy.width).round(0)[:, 0])
    assert (out["action"] > 50).all()


# --- policies that can't be run so


def _refused(policy: TensorDictModuleBase, message: str) -> None:
    counter_policy = CounterPolicy(policy, RANDOM)
    with pytest.raises(PolicyError, match=message):
        counter_policy.prepare(make_batch(policy))


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _with(module: nn.Module) -> TensorDictModuleBase:
    return make_actor(D.Categorical, ["logits"], nn.Sequential(make_net(4), module))


def test_dropout_in_training_mode_is_refused() -> None:
    _refused(_with(nn.Dropout(0.1)), r"module\.0\.module\.1 \(Dropout\).*policy\.eval\(\)")
    _refused(_with(nn.TransformerEncoderLayer(4, 1, 4)), "drops activations at random")
    CounterPolicy(_with(nn.Dropout(0.1)).eval(), RANDOM).prepare(make_batch(_with(nn.Identity())))
    CounterPolicy(_with(nn.Dropout(0.0)), RANDOM).prepare(make_batch(_with(nn.Identity())))


@pytest.mark.parametrize(
    ("drop", "by"),
    [
        (F.dropout, "dropout"),
        (lambda x: F.dropout(x, 0.1, True), "dropout"),
        (lambda x: torch.dropout(x, 0.1, True), "dropout"),
        (lambda x: torch.dropout(x, p=0.1, train=True), "dropout"),
        (lambda x: F.alpha_dropout(x, training=True), "alpha_dropout"),
        (lambda x: F.dropout1d(x[None])[0], "dropout1d"),
        (
            lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
            "scaled_dot_product_attention",
        ),
        (lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.1), "scaled_dot_product"),
    ],
)
def test_dropout_by_a_function_is_refused(drop: Any, by: str) -> None:
    _refused(_with(Calls(drop)), f"drops activations at random, by {by}")


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: torch.dropout(x, 0.1, False),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: x + 0.1 * torch.randn_like(x),  # as noisy networks do
    ],
)
def test_what_drops_nothing_is_taken(drop: Any) -> None:
    CounterPolicy(_with(Calls(drop)), RANDOM).prepare(make_batch(_with(nn.Identity())))


def test_consistent_dropout_is_taken() -> None:
    policy = TensorDictSequential(
        ConsistentDropoutModule(p=0.5, in_keys="observation", out_keys="dropped"),
        TensorDictModule(make_net(4), ["dropped"], ["action"]),
    )
    CounterPolicy(policy, RANDOM).prepare(make_batch(_with(nn.Identity())))


def test_a_buffer_that_changes_is_refused_by_name() -> None:
    said = r"\(BatchNorm1d\) changes its buffer 'running_mean'.*normalise in the environment"
    _refused(_with(nn.BatchNorm1d(4)), said)
    said = r"\(_SpectralNorm\) changes its buffer '_u'.*eval\(\).*without a change of buffers"
    _refused(_with(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))), said)
    CounterPolicy(_with(nn.BatchNorm1d(4)).eval(), RANDOM).prepare(make_batch(_with(nn.Identity())))


def test_a_buffer_that_changes_is_refused_where_a_single_row_fails_too() -> None:
    """As a collector of one environment has it: batch normalisation takes two rows and more."""
    policy = _with(nn.BatchNorm1d(4))
    said = r"\(BatchNorm1d\) changes its buffer .*policy\.eval\(\).*normalise in the environment"
    with pytest.raises(PolicyError, match=said):
        CounterPolicy(policy, RANDOM).prepare(make_batch(policy)[:1])


def test_embeddings_that_rescale_themselves_are_refused() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    net.append(nn.Embedding(3, 4, max_norm=1.0))
    _refused(make_actor(D.Categorical, ["logits"], net), r"\(Embedding\) rescales its weights")


def test_lazy_modules_are_refused() -> None:
    lazy = make_actor(D.Categorical, ["logits"], nn.LazyLinear(4))
    _refused(lazy, r"\(LazyLinear\) has uninitialised parameters")


def test_state_outside_of_inputs_and_outputs_is_refused() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + self.calls

    class OtherGenerator(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + random.random()

    _refused(_with(Counting()), "change from call to call")
    _refused(_with(OtherGenerator()), "draws from Python's or numpy's generator")


def test_a_batch_of_another_size_is_refused() -> None:
    class Two(TensorDictModuleBase):
        in_keys = ["observation"]  # noqa: RUF012
        out_keys = ["action"]  # noqa: RUF012

        def forward(self, td: TensorDict) -> TensorDict:
            return td[:2]

    _refused(Two(), "batch size")


def test_a_distribution_without_rows_is_refused() -> None:
    def first(logits: Tensor) -> D.Distribution:
        return D.Categorical(logits=logits[0])

    _refused(make_actor(first, ["logits"], make_net(4)), "a row for each of the 8 observations")


def test_more_draws_than_in_the_trial_are_refused() -> None:
    policy, td, words = prepared(CASES["truncated"])
    with pytest.raises(PolicyError, match="more random numbers per row"):
        policy(td, words[:, :1])
