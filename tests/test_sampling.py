"""Policies that draw from a counter: each row is a function of its input and its words (I6)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    EGreedyModule,
    LSTMModule,
    ProbabilisticActor,
    QValueActor,
    ValueOperator,
)
from torchrl.modules import distributions as rl_dist

from torchrl_hts.draws import CounterNoise, _uniforms, draw_categorical, draw_index
from torchrl_hts.errors import PolicyError
from torchrl_hts.invariance import row_bits
from torchrl_hts.sampling import CounterPolicy

RANDOM = ExplorationType.RANDOM
M = 8  # rows of a batch
OBS = 6


pytestmark = pytest.mark.usefixtures("seeded_thread")


# --- whole policies


def _net(out: int, extract: bool = False) -> nn.Module:
    net = MLP(in_features=OBS, out_features=out, num_cells=[16, 16])
    return nn.Sequential(net, NormalParamExtractor()) if extract else net


def _actor(kind: Any, keys: list[str], net: nn.Module, **kwargs: Any) -> ProbabilisticActor:
    module = TensorDictModule(net, ["observation"], keys)
    return ProbabilisticActor(
        module, in_keys=keys, distribution_class=kind, return_log_prob=True, **kwargs
    )


class _Split(nn.Module):
    """Parameters of three nested distributions, under the names that they are read by."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net(8)

    def forward(self, observation: Tensor) -> TensorDict:
        out = self.net(observation)
        params = {
            "move": {"logits": out[..., :3]},
            "aim": {"loc": out[..., 3:5], "scale": out[..., 5:7].exp()},
            "other": {"concentration1": out[..., 7:].exp(), "concentration0": out[..., 7:].exp()},
        }
        return TensorDict(params, [len(out)])


def _composite(last: bool) -> ProbabilisticTensorDictSequential:
    kinds = {"move": D.Categorical, "aim": rl_dist.TanhNormal}
    if last:
        kinds["other"] = D.Beta
    return ProbabilisticActor(
        TensorDictModule(_Split(), ["observation"], ["params"]),
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": kinds},
        return_log_prob=True,
    )


def _plain_sequential() -> ProbabilisticTensorDictSequential:
    """tensordict's own modules, with nothing of TorchRL."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(_net(4, True), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=D.Normal, return_log_prob=True
        ),
    )


def _actor_value(policy_only: bool) -> TensorDictModuleBase:
    operator = ActorValueOperator(
        TensorDictModule(_net(16), ["observation"], ["hidden"]),
        ProbabilisticActor(
            TensorDictModule(nn.Linear(16, 3), ["hidden"], ["logits"]),
            in_keys=["logits"],
            distribution_class=D.Categorical,
            return_log_prob=True,
        ),
        ValueOperator(nn.Linear(16, 1), ["hidden"]),
    )
    return operator.get_policy_operator() if policy_only else operator


def _recurrent() -> TensorDictModuleBase:
    lstm = LSTMModule(OBS, 7, in_key="observation", out_key="hidden")
    head = TensorDictModule(nn.Linear(7, 3), ["hidden"], ["logits"])
    return ProbabilisticTensorDictSequential(
        lstm,
        head,
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=D.Categorical, return_log_prob=True
        ),
    )


def _agents() -> ProbabilisticTensorDictSequential:
    """Three agents per environment, under a nested key."""
    return ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(_net(12), nn.Unflatten(-1, (3, 4))),
            ["observation"],
            [("agents", "logits")],
        ),
        in_keys=[("agents", "logits")],
        out_keys=[("agents", "action")],
        distribution_class=D.Categorical,
        return_log_prob=True,
    )


class _Noisy(nn.Module):
    """Draws from torch's global generator, on its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def _exploring() -> TensorDictModuleBase:
    spec = CategoricalSpec(4)
    actor = QValueActor(_net(4), in_keys=["observation"], spec=spec)
    explore = EGreedyModule(spec=spec, eps_init=0.5, eps_end=0.5)
    return TensorDictSequential(actor, explore)


class _Positive(nn.Module):
    """Two positive parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net(4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.net(x).exp().chunk(2, -1)


_LOC = ["loc", "scale"]
_BETA = ["concentration1", "concentration0"]


def _noisy(**kwargs: Any) -> TensorDictModuleBase:
    return _actor(D.Categorical, ["logits"], nn.Sequential(_net(4), _Noisy()), **kwargs)


@dataclass(frozen=True)
class _Case:
    make: Callable[[], TensorDictModuleBase]
    width: int
    row_by_row: bool = False
    short_cut: bool = True


CASES = {
    "categorical": _Case(lambda: _actor(D.Categorical, ["logits"], _net(4)), 1),
    "one-hot": _Case(lambda: _actor(rl_dist.OneHotCategorical, ["logits"], _net(4)), 1),
    "normal": _Case(lambda: _actor(rl_dist.IndependentNormal, _LOC, _net(4, True)), 2),
    "tanh-normal": _Case(lambda: _actor(rl_dist.TanhNormal, _LOC, _net(4, True)), 2),
    "truncated": _Case(lambda: _actor(rl_dist.TruncatedNormal, _LOC, _net(4, True)), 2),
    "deterministic": _Case(lambda: TensorDictModule(_net(2), ["observation"], ["action"]), 0),
    "tensordict": _Case(_plain_sequential, 2),
    "actor and value": _Case(lambda: _actor_value(False), 1),
    "policy operator": _Case(lambda: _actor_value(True), 1),
    "nested agents": _Case(_agents, 3),
    "own generator": _Case(lambda: _actor(D.Categorical, ["logits"], _net(4), generator=3), 1),
    "composite": _Case(lambda: _composite(False), 3, short_cut=False),
    "composite, with another": _Case(lambda: _composite(True), 1, short_cut=False),
    "recurrent": _Case(_recurrent, 1, short_cut=False),
    "beta": _Case(lambda: _actor(D.Beta, _BETA, _Positive()), 1, short_cut=False),
    "noisy": _Case(_noisy, 1, row_by_row=True, short_cut=False),
    "noisy, own generator": _Case(lambda: _noisy(generator=3), 1, row_by_row=True, short_cut=False),
    "epsilon-greedy": _Case(_exploring, 1, row_by_row=True, short_cut=False),
}


_IN_NUMPY = ("categorical", "actor and value", "policy operator", "own generator")


def _batch(policy: TensorDictModuleBase) -> TensorDict:
    td = TensorDict({"observation": torch.randn(M, OBS)}, [M])
    if "is_init" in policy.in_keys:
        td["is_init"] = torch.arange(M).unsqueeze(-1) % 3 == 0
        td["recurrent_state_h"] = torch.randn(M, 1, 7)
        td["recurrent_state_c"] = torch.randn(M, 1, 7)
    return td


def _prepared(case: _Case) -> tuple[CounterPolicy, TensorDict, Any]:
    policy = CounterPolicy(case.make(), RANDOM)
    td = _batch(policy.policy)
    policy.prepare(td)
    return policy, td, CounterNoise(1, M, 1, policy.width).round(0)[:, 0]


def _bits(out: TensorDictBase) -> dict[Any, bytes]:
    return {key: row_bits([value]).tobytes() for key, value in out.items(True, True)}


each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@each_case
def test_prepare_finds_how_a_policy_draws(case: _Case) -> None:
    policy, td, words = _prepared(case)
    assert (policy.width, policy.row_by_row) == (case.width, case.row_by_row)
    assert (policy._steps is not None) == case.short_cut
    out = policy(td.copy(), words)
    missing = [key for key in policy.policy.out_keys if key not in out.keys(True)]
    assert not missing


@each_case
def test_a_row_is_a_function_of_its_input_and_words(case: _Case) -> None:  # I6
    policy, td, words = _prepared(case)
    out = policy(td.copy(), words)
    policy(td.copy(), words[::-1].copy())
    assert _bits(policy(td.copy(), words)) == _bits(out)
    order = torch.randperm(M)
    moved = policy(td[order], words[order.numpy()])
    assert _bits(moved) == _bits(out[order])


@each_case
def test_the_words_decide(case: _Case) -> None:
    policy, td, _ = _prepared(case)
    noise = CounterNoise(1, M, 1, case.width)
    draws = [_bits(policy(td.copy(), noise.round(round_)[:, 0])) for round_ in range(8)]
    assert any(draw != draws[0] for draw in draws) == (case.width > 0)


@each_case
def test_global_generators_and_the_policy_are_left_alone(case: _Case) -> None:
    policy = case.make()
    attributes = [set(vars(module)) for module in policy.modules()]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    counter_policy = CounterPolicy(policy, RANDOM)
    td = _batch(policy)
    torch.set_rng_state(before[0])
    counter_policy.prepare(td)
    counter_policy(td, CounterNoise(1, M, 1, counter_policy.width).round(0)[:, 0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    assert [set(vars(module)) for module in policy.modules()] == attributes


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.short_cut])
@pytest.mark.parametrize("kind", [RANDOM, ExplorationType.DETERMINISTIC])
def test_the_short_cut_keeps_every_bit(name: str, kind: ExplorationType) -> None:
    policy = CounterPolicy(CASES[name].make(), kind)
    td = _batch(policy.policy)
    policy.prepare(td)
    assert policy._steps is not None
    for round_ in range(5):
        words = CounterNoise(1, M, 1, policy.width).round(round_)[:, 0]
        td = _batch(policy.policy)
        short = policy(td.copy(), words)
        steps, policy._steps = policy._steps, None
        whole = policy(td.copy(), words)
        policy._steps = steps
        if kind is RANDOM and name in _IN_NUMPY:  # rounded otherwise
            torch.testing.assert_close(
                short.pop("action_log_prob"), whole.pop("action_log_prob"), rtol=1e-6, atol=1e-6
            )
        assert _bits(short) == _bits(whole)


def test_the_short_cut_does_not_hang_on_the_rounding_of_draws() -> None:
    """Which way is taken must not depend on the parameters, or a resumed run could take another."""
    policy, td, _ = _prepared(CASES["categorical"])
    assert policy.short_cut
    differ = 0
    for round_ in range(20):
        out = policy(td.copy(), CounterNoise(1, M, 1, policy.width).round(round_)[:, 0])
        with torch.inference_mode():
            exact = policy.policy.get_dist(td).log_prob(out["action"])
        differ += int((out["action_log_prob"] != exact).sum())
    assert differ


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


def test_draw_categorical_never_draws_the_impossible() -> None:
    logits = np.array([[-np.inf, 0.0, -np.inf, 3.0, -np.inf]] * 2, np.float32)
    index, log_prob = draw_categorical(logits, np.array([2.0**-53, 1 - 2.0**-53]))
    assert index.tolist() == [1, 3]
    np.testing.assert_allclose(log_prob, [-3.0485874, -0.0485874], rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_draw_categorical_shows_bad_logits_in_the_log_prob(bad: float) -> None:
    rows = np.array([[0.0, bad], [0.0, 0.0], [-np.inf, -np.inf]], np.float32)
    _, log_prob = draw_categorical(rows, np.full(3, 0.25))
    assert np.isnan(log_prob).tolist() == [True, False, True]


def test_layers_of_plain_sequences_are_called_one_by_one() -> None:
    """Shared layers as often as they occur, layers with layers inside whole."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(OBS, OBS)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    shared = nn.Linear(OBS, OBS)
    net = nn.Sequential(shared, nn.Sequential(nn.Tanh(), Residual()), shared, MLP(OBS, 4))
    policy = CounterPolicy(_actor(D.Categorical, ["logits"], net), RANDOM)
    td = _batch(policy.policy)
    policy.prepare(td)
    assert policy.short_cut
    words = CounterNoise(1, M, 1, policy.width).round(0)[:, 0]
    called: list[str] = []
    with torch.inference_mode():
        assert torch.equal(policy(td.copy(), words)["logits"], net(td["observation"]))
    for name, module in net.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    assert torch.equal(policy(td.copy(), words)["logits"], net(td["observation"]).detach())
    assert len(called) == 2 * len(set(called)) + 2  # each, the shared one twice, in both calls


class _MasksInGetDist(ProbabilisticTensorDictModule):
    def get_dist(self, tensordict: TensorDictBase) -> D.Distribution:
        logits = tensordict["logits"].clone()
        logits[..., 0] = -torch.inf
        return D.Categorical(logits=logits)


class _AlwaysThree(ProbabilisticTensorDictModule):
    def _dist_sample(self, dist: D.Distribution, **kwargs: Any) -> Tensor:
        return torch.full_like(super()._dist_sample(dist, **kwargs), 3)


def _masks_in_an_attribute(*args: Any, **kwargs: Any) -> ProbabilisticTensorDictModule:
    module = ProbabilisticTensorDictModule(*args, **kwargs)
    module.__dict__["get_dist"] = partial(_MasksInGetDist.get_dist, module)
    return module


@pytest.mark.parametrize("make", [_MasksInGetDist, _AlwaysThree, _masks_in_an_attribute])
def test_what_a_module_does_its_own_way_is_kept(make: Any) -> None:
    draws = make(
        ["logits"], ["action"], distribution_class=D.Categorical, return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )  # fmt: skip
    net = TensorDictModule(nn.Linear(OBS, 4), ["observation"], ["logits"])
    policy = CounterPolicy(ProbabilisticTensorDictSequential(net, draws), RANDOM)
    td = _batch(policy.policy)
    policy.prepare(td)
    actions = set()
    for round_ in range(20):
        out = policy(td.copy(), CounterNoise(1, M, 1, policy.width).round(round_)[:, 0])
        actions |= set(out["action"].tolist())
    assert actions == ({3} if make is _AlwaysThree else {1, 2, 3})


def test_hooks_of_a_policy_are_run() -> None:
    net = nn.Sequential(nn.Linear(OBS, 4))
    net[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    policy = CounterPolicy(_actor(D.Categorical, ["logits"], net), RANDOM)
    td = _batch(policy.policy)
    policy.prepare(td)
    words = CounterNoise(1, M, 1, policy.width).round(0)[:, 0]
    with torch.inference_mode():
        assert torch.equal(policy(td.copy(), words)["logits"], net(td["observation"]))


def test_the_short_cut_is_not_taken_where_it_would_change_a_bit() -> None:
    class Doubling(TensorDictModule):
        def _call_module(self, tensors: Any, **kwargs: Any) -> Any:
            return 2 * super()._call_module(tensors, **kwargs)

    class Naming(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"action": x + 1}

    for module in (Doubling(_net(2), ["observation"], ["action"]),
                   TensorDictModule(Naming(), ["observation"], ["action"])):  # fmt: skip
        policy = CounterPolicy(module, RANDOM)
        td = _batch(module)
        policy.prepare(td)
        assert policy._steps is None
        with torch.inference_mode():
            stock = module(td.copy())
        assert _bits(policy(td, np.zeros((M, 0), np.uint64))) == _bits(stock)


@pytest.mark.parametrize("name", ["categorical", "one-hot", "normal", "tensordict", "beta"])
def test_log_probs_are_the_distribution_s(name: str) -> None:
    policy, td, words = _prepared(CASES[name])
    out = policy(td.copy(), words)
    with torch.inference_mode():
        expected = policy.policy.get_dist(td).log_prob(out["action"])
    if name in ("beta", "categorical"):  # scored in batches of one row; in numpy
        torch.testing.assert_close(out["action_log_prob"], expected)
    else:
        assert torch.equal(out["action_log_prob"], expected)


def test_tanh_normal_is_scored_as_torchrl_scores_it() -> None:
    policy, td, words = _prepared(CASES["tanh-normal"])
    out = policy(td.copy(), words)
    with torch.no_grad():
        dist = policy.policy.get_dist(td)
    preimage = (
        torch.special.ndtri(torch.from_numpy(_uniforms(words))).float() * dist.scale + dist.loc
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.base_dist, "rsample", lambda shape: preimage)
        action, log_prob = dist.rsample_and_log_prob()
    assert torch.equal(out["action"], action)
    assert torch.equal(out["action_log_prob"], log_prob)


def test_composite_parts_have_words_of_their_own() -> None:
    policy, td, words = _prepared(CASES["composite"])
    out = policy(td.copy(), words)
    other = words.copy()
    other[:, 1:] += np.uint64(2**60)
    changed = policy(td.copy(), other)
    assert torch.equal(out["move"], changed["move"])
    assert (out["aim"] != changed["aim"]).all()
    assert {"move_log_prob", "aim_log_prob"} <= set(out.keys())


@pytest.mark.parametrize("name", ["noisy", "epsilon-greedy"])
def test_rows_run_alone_are_the_same_in_any_batch(name: str) -> None:
    policy, td, words = _prepared(CASES[name])
    out = policy(td.copy(), words)
    for k in (1, 3):
        assert _bits(policy(td[:k], words[:k])) == _bits(out[:k])


def test_deterministic_exploration_runs_the_policy_as_it_is() -> None:
    for name in ("categorical", "tanh-normal", "composite", "beta", "recurrent"):
        kind = ExplorationType.DETERMINISTIC
        policy = CounterPolicy(CASES[name].make(), kind)
        td = _batch(policy.policy)
        policy.prepare(td)
        assert policy.width == 0
        with set_exploration_type(kind), torch.inference_mode():
            stock = policy.policy(td.copy())
        assert _bits(policy(td.copy(), np.zeros((M, 0), np.uint64))) == _bits(stock)


def test_a_mean_estimated_from_samples_is_seeded_row_by_row() -> None:
    policy = CounterPolicy(CASES["tanh-normal"].make(), ExplorationType.MEAN)
    td = _batch(policy.policy)
    policy.prepare(td)
    assert (policy.width, policy.row_by_row) == (1, True)
    words = CounterNoise(1, M, 1, 1).round(0)[:, 0]
    assert _bits(policy(td.copy(), words)) == _bits(policy(td.copy(), words))


def test_a_subclass_that_draws_its_own_way_is_not_taken_for_its_base() -> None:
    class Shifted(D.Normal):
        def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
            return super().rsample(sample_shape) + 100

    policy = CounterPolicy(_actor(Shifted, _LOC, _net(4, True)), RANDOM)
    td = _batch(policy.policy)
    policy.prepare(td)
    out = policy(td, CounterNoise(1, M, 1, policy.width).round(0)[:, 0])
    assert (out["action"] > 50).all()


# --- policies that can't be run so


def _refused(policy: TensorDictModuleBase, message: str) -> None:
    counter_policy = CounterPolicy(policy, RANDOM)
    with pytest.raises(PolicyError, match=message):
        counter_policy.prepare(_batch(policy))


def _with(module: nn.Module) -> TensorDictModuleBase:
    return _actor(D.Categorical, ["logits"], nn.Sequential(_net(4), module))


def test_dropout_in_training_mode_is_refused() -> None:
    _refused(_with(nn.Dropout(0.1)), r"module\.0\.module\.1 \(Dropout\).*policy\.eval\(\)")
    _refused(_with(nn.TransformerEncoderLayer(4, 1, 4)), "drops activations at random")
    CounterPolicy(_with(nn.Dropout(0.1)).eval(), RANDOM).prepare(_batch(_with(nn.Identity())))
    CounterPolicy(_with(nn.Dropout(0.0)), RANDOM).prepare(_batch(_with(nn.Identity())))


def test_a_buffer_that_changes_is_refused_by_name() -> None:
    _refused(_with(nn.BatchNorm1d(4)), r"\(BatchNorm1d\) changes its buffer 'running_mean'")
    CounterPolicy(_with(nn.BatchNorm1d(4)).eval(), RANDOM).prepare(_batch(_with(nn.Identity())))


def test_lazy_modules_are_refused() -> None:
    lazy = _actor(D.Categorical, ["logits"], nn.LazyLinear(4))
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
    _refused(_with(OtherGenerator()), "change from call to call")


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

    _refused(_actor(first, ["logits"], _net(4)), "a row for each of the 8 observations")


def test_more_draws_than_in_the_trial_are_refused() -> None:
    policy, td, words = _prepared(CASES["normal"])
    with pytest.raises(PolicyError, match="more random numbers per row"):
        policy(td, words[:, :1])


def test_a_policy_with_selected_out_keys_takes_the_short_cut() -> None:
    """Its hook only leaves keys out; the bits are those of the whole policy."""
    torch.manual_seed(0)

    def policy() -> ProbabilisticActor:
        net = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
        return ProbabilisticActor(
            net, in_keys=["logits"], distribution_class=D.Categorical, return_log_prob=True
        )

    whole = policy()
    selected = policy().select_out_keys("action", "action_log_prob")
    selected.load_state_dict(whole.state_dict())
    td = TensorDict({"observation": torch.randn(5, 3)}, [5])
    words = np.arange(5, dtype=np.uint64)[:, None] << np.uint64(60)
    outputs = []
    for module in (whole, selected):
        counter = CounterPolicy(module, RANDOM)
        counter.prepare(td)
        assert counter.short_cut
        outputs.append(counter(td.copy(), words))
    assert "logits" not in outputs[1].keys()
    for key in ("action", "action_log_prob"):
        assert torch.equal(outputs[0][key], outputs[1][key])
