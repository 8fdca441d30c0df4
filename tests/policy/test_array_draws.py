"""Draws on arrays: that they are torch's, and that what they are not made for is left to torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampled_policies import RANDOM
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    TensorDictParams,
    set_composite_lp_aggregate,
)
from torch import Tensor
from torch import distributions as D
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, SafeProbabilisticModule, TanhNormal

from torchrl_hts._policy.array_draws import array_draw
from torchrl_hts._policy.counter_policy import CounterPolicy
from torchrl_hts._policy.draws import CounterNoise, uniforms_of

ROWS = 2_000
LOW, HIGH = torch.tensor([-1.0, -3.0, 0.0]), torch.tensor([1.0, 5.0, 0.5])
IN_KEYS = ["loc", "scale"]


def module_of(
    kind: Any, kwargs: dict[str, Any], in_keys: Any = IN_KEYS, out_keys: Any = ("action",)
) -> SafeProbabilisticModule:
    return SafeProbabilisticModule(
        in_keys, list(out_keys), distribution_class=kind, distribution_kwargs=kwargs,
        return_log_prob=True,
    )  # fmt: skip


def parameters(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3,)) -> TensorDict:
    """Far apart, so that some values are squashed to the bounds."""
    rng = torch.Generator().manual_seed(0)
    loc = 4 * torch.randn(ROWS, *shape, generator=rng, dtype=dtype)
    scale = (2 * torch.randn(ROWS, *shape, generator=rng, dtype=dtype)).exp()
    return TensorDict({"loc": loc, "scale": scale}, [ROWS])


def scored(module: Any, td: TensorDict, words: Any) -> tuple[Tensor, Tensor]:
    """The sample of some words and its log-probability, by torch's distributions in float64."""
    dist = module.get_dist(td.double())
    normal: Any = dist
    while not isinstance(normal, D.Normal):
        normal = normal.base_dist
    u = torch.from_numpy(uniforms_of(words)).reshape(normal.loc.shape)
    value = normal.loc + normal.scale * torch.special.ndtri(u)
    score = normal.log_prob(value)
    if not isinstance(dist, TanhNormal):
        return value, dist.log_prob(value)
    (transform,) = dist.transforms
    action = transform(value)
    return action, (score - transform.log_abs_det_jacobian(value, action)).sum(-1)


def drawn(module: Any, td: TensorDict) -> tuple[TensorDict, Any]:
    policy = CounterPolicy(module, RANDOM)
    policy.prepare(td[:8])
    words = CounterNoise(3, len(td), 1, policy.width).round(0)[:, 0]
    return policy(td.copy(), words), words


KINDS = [
    (D.Normal, {}),
    (IndependentNormal, {}),
    (IndependentNormal, {"upscale": 2.0, "tanh_loc": False, "event_dim": 1}),
    (TanhNormal, {}),
    (TanhNormal, {"low": -2, "high": 3.5}),
    (TanhNormal, {"low": LOW, "high": HIGH, "event_dims": 1, "safe_tanh": True}),
]


@pytest.mark.parametrize(("kind", "kwargs"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("agents", [(), (2,)])
def test_values_and_scores_are_torchs(
    kind: Any, kwargs: dict[str, Any], dtype: torch.dtype, agents: tuple[int, ...]
) -> None:
    kwargs = {
        name: value.to(dtype) if isinstance(value, Tensor) else value
        for name, value in kwargs.items()
    }
    module, td = module_of(kind, kwargs), parameters(dtype, (*agents, 3))
    assert array_draw(module, RANDOM) is not None
    out, words = drawn(module, td)
    assert out["action"].dtype == out["action_log_prob"].dtype == dtype
    action, score = scored(module, td, words)
    # The score is that of a value that was rounded, which counts where the scale is small.
    size = (td["loc"].abs() / td["scale"]).amax() if dtype == torch.float32 else 0
    torch.testing.assert_close(out["action"].double(), action, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(
        out["action_log_prob"].double(), score, rtol=1e-4, atol=1e-5 + 1e-6 * float(size)
    )
    if kind is TanhNormal:
        assert (out["action"] == out["action"].amax(0)).sum() > 10 * 3, "some are at the bounds"


def test_squashed_values_and_scores_stay_finite() -> None:
    """As TorchRL's do: an action is never at its bound, wherever the network puts it."""
    module = module_of(TanhNormal, {"low": LOW, "high": HIGH})
    loc = torch.tensor([[1e4, -1e4, 30.0]]).expand(8, 3)
    out, _ = drawn(module, TensorDict({"loc": loc, "scale": torch.ones(8, 3)}, [8]))
    assert out["action_log_prob"].isfinite().all()
    assert ((out["action"] > LOW) & (out["action"] < HIGH)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squashed_values_are_cut_where_torchs_are(dtype: torch.dtype) -> None:
    module = module_of(TanhNormal, {})
    loc = torch.tensor([[1e4, -1e4, 30.0]], dtype=dtype).expand(8, 3)
    td = TensorDict({"loc": loc, "scale": torch.ones_like(loc)}, [8])
    out, _ = drawn(module, td)
    with torch.no_grad(), set_exploration_type(RANDOM):
        assert torch.equal(out["action"], module(td.copy())["action"])


def test_parameters_are_told_apart_by_the_names_that_the_distribution_has_for_them() -> None:
    td = parameters()
    swapped = module_of(IndependentNormal, {}, {"scale": "loc", "loc": "scale"})
    renamed = TensorDict({"loc": td["scale"], "scale": td["loc"]}, [ROWS])
    expected, _ = drawn(module_of(IndependentNormal, {}), td)
    out, _ = drawn(swapped, renamed)
    assert array_draw(swapped, RANDOM) is not None
    assert torch.equal(out["action"], expected["action"])
    assert torch.equal(out["action_log_prob"], expected["action_log_prob"])


def test_parameters_under_nested_keys() -> None:
    keys = [("agents", "loc"), ("agents", "scale")]
    module = module_of(TanhNormal, {}, keys, [("agents", "action")])
    plain = parameters(shape=(2, 3))
    td = TensorDict({"agents": TensorDict(dict(plain.items()), [ROWS, 2])}, [ROWS])
    out, _ = drawn(module, td)
    expected, _ = drawn(module_of(TanhNormal, {}), plain)
    assert torch.equal(out["agents", "action"], expected["action"])
    assert torch.equal(out["agents", "action_log_prob"], expected["action_log_prob"])


@pytest.mark.parametrize("name", IN_KEYS)
@pytest.mark.parametrize(("kind", "kwargs"), KINDS)
def test_nan_comes_out_where_it_went_in(kind: Any, kwargs: dict[str, Any], name: str) -> None:
    """The actor says which environments it is, and what it comes from."""
    policy, td = CounterPolicy(module_of(kind, kwargs), RANDOM), parameters()
    policy.prepare(td)
    td[name][5, 1] = torch.nan
    out = policy(td, CounterNoise(0, ROWS, 1, 3).round(0)[:, 0])
    for key in ("action", "action_log_prob"):
        assert out[key].isnan().reshape(ROWS, -1).any(-1).nonzero().tolist() == [[5]]


class Bounded(D.Normal):
    """Has bounds that are no numbers, or none."""

    def __init__(self, loc: Tensor, scale: Tensor, low: Any = None) -> None:
        super().__init__(loc, scale)


OTHERS = [
    (Bounded, {"low": None}),
    (Bounded, {"low": torch.zeros_like}),
    (D.Normal, {"validate_args": False}),
    (IndependentNormal, {"tanh_loc": True}),
    (IndependentNormal, {"event_dim": 2}),
    (TanhNormal, {"tanh_loc": True}),
    (TanhNormal, {"event_dims": 0}),
    (TanhNormal, {"event_dims": 2}),
    (TanhNormal, {"safe_tanh": False}),
]


@pytest.mark.parametrize(("kind", "kwargs"), OTHERS)
def test_other_distributions_are_left_to_torch(kind: Any, kwargs: dict[str, Any]) -> None:
    assert array_draw(module_of(kind, kwargs), RANDOM) is None


def test_modules_that_score_what_was_squashed_are_left_to_torch() -> None:
    """Its score is that of the value that the rounded action leads back to."""

    def module(score: bool) -> ProbabilisticTensorDictModule:
        return ProbabilisticTensorDictModule(
            IN_KEYS, ["action"], distribution_class=TanhNormal, return_log_prob=score
        )

    assert array_draw(module(True), RANDOM) is None
    assert array_draw(module(False), RANDOM) is not None
    assert array_draw(module(False), ExplorationType.DETERMINISTIC) is None


def test_a_module_that_does_not_score_needs_no_key_for_it() -> None:
    """There is none where log-probabilities are aggregated otherwise than when it was made."""
    with set_composite_lp_aggregate(True):
        module = SafeProbabilisticModule(IN_KEYS, ["action"], distribution_class=TanhNormal)
    found = array_draw(module, RANDOM)
    assert found is not None
    assert found.out_keys == ["action"]


def _bounds() -> TensorDict:
    return TensorDict({"low": LOW.clone(), "high": HIGH.clone()})


LEARNED = {
    "parameters": lambda: TensorDictParams(_bounds()),
    "buffers": lambda: TensorDictParams(_bounds(), no_convert=True),
    "tensors": lambda: {name: bound.requires_grad_() for name, bound in _bounds().items()},
}


@pytest.mark.parametrize("name", LEARNED)
def test_bounds_that_may_be_learned_are_read_where_they_lie(name: str) -> None:
    kwargs, td = LEARNED[name](), parameters()
    module = module_of(TanhNormal, kwargs)
    policy = CounterPolicy(module, RANDOM)
    policy.prepare(td[:8])
    words = CounterNoise(3, ROWS, 1, policy.width).round(0)[:, 0]
    with torch.no_grad():
        for bound in kwargs.values():
            bound.mul_(2)
        action, _ = scored(module, td, words)
    torch.testing.assert_close(policy(td, words)["action"].double(), action, rtol=1e-5, atol=6e-6)


@pytest.mark.parametrize(
    ("kind", "kwargs", "scale"),
    [
        (IndependentNormal, {}, torch.ones(8, 1)),
        (IndependentNormal, {}, torch.ones(8, 3, dtype=torch.float64)),
        (TanhNormal, {"low": LOW.double(), "high": HIGH.double()}, torch.ones(8, 3)),
        (TanhNormal, {"low": torch.tensor(-2, dtype=torch.float64)}, torch.ones(8, 3)),
        (TanhNormal, {"low": -torch.ones(2, 3), "high": torch.ones(2, 3)}, torch.ones(8, 2, 3)),
    ],
)
def test_parameters_that_torch_brings_together_are_left_to_it(
    kind: Any, kwargs: dict[str, Any], scale: Tensor
) -> None:
    module = module_of(kind, kwargs)
    shape = scale.shape if scale.ndim > 2 else (8, 3)
    td = TensorDict({"loc": torch.zeros(shape), "scale": scale}, [8])
    out, words = drawn(module, td)
    with torch.no_grad(), set_exploration_type(RANDOM):
        expected = module(td.copy())
    assert out["action"].dtype == expected["action"].dtype
    assert out["action_log_prob"].shape == expected["action_log_prob"].shape
    assert out["action_log_prob"].dtype == expected["action_log_prob"].dtype
    np.testing.assert_allclose(out["action"], scored(module, td, words)[0], rtol=1e-5, atol=1e-6)
