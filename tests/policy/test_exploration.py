"""Exploration modules draw from a counter what TorchRL's own draw from torch's generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Binary, Bounded, Categorical, Composite, OneHot, TensorSpec
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    AdditiveGaussianModule,
    EGreedyModule,
    OrnsteinUhlenbeckProcessModule,
)

from torchrl_hts._policy.counter_policy import CounterPolicy
from torchrl_hts._policy.draws import CounterNoise

pytestmark = pytest.mark.usefixtures("seeded_thread")

ROWS = 20_000
KEY: Any = "action"


def drawn(policy: TensorDictSequential, td: TensorDict, key: Any = KEY) -> tuple[Tensor, Tensor]:
    """Actions by the counter's noise, all rows at once, and by the policy itself."""
    counted = CounterPolicy(policy, ExplorationType.RANDOM)
    counted.prepare(td[:8])
    assert not counted.row_by_row
    words = CounterNoise(0, ROWS, 1, counted.width).round(0)[:, 0]
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        return counted(td.clone(), words)[key], policy(td.clone())[key]


def acting(action: Tensor, explore: nn.Module, *reads: str, key: Any = KEY) -> TensorDictSequential:
    """Always the same action, then noise."""
    keys = ["observation", *reads]

    def act(observation: Tensor, *others: Tensor) -> Tensor:
        return action.expand(len(observation), *action.shape).clone()

    return TensorDictSequential(TensorDictModule(act, keys, [key]), explore)


def rows(**more: Tensor) -> TensorDict:
    return TensorDict({"observation": torch.zeros(ROWS, 1), **more}, [ROWS])


def greedy(spec: TensorSpec, **options: Any) -> EGreedyModule:
    return EGreedyModule(spec=spec, eps_init=0.4, eps_end=0.4, **options)


@pytest.mark.parametrize(
    ("spec", "action"),
    [
        (Categorical(4), torch.tensor(1)),
        (Categorical(4, shape=(1,)), torch.tensor([1])),
        (OneHot(4), torch.tensor([0, 1, 0, 0])),
        (OneHot(4, dtype=torch.bool), torch.tensor([False, True, False, False])),
        (Composite(action=Categorical(4)), torch.tensor(1)),
    ],
)
def test_epsilon_greedy_over_indices(spec: TensorSpec, action: Tensor) -> None:
    counted, own = drawn(acting(action, greedy(spec)), rows())
    assert (counted.dtype, counted.shape) == (own.dtype, own.shape)
    index = [x.long().argmax(-1) if x.shape[-1:] == (4,) else x.flatten() for x in (counted, own)]
    shares = [i.bincount(minlength=4) / ROWS for i in index]
    assert (shares[0] - torch.tensor([0.1, 0.7, 0.1, 0.1])).abs().max() < 0.015
    assert (shares[0] - shares[1]).abs().max() < 0.02


def test_epsilon_greedy_with_a_mask_for_each_row() -> None:
    mask = torch.tensor([[True, True, False], [False, True, True]]).repeat(ROWS // 2, 1)
    explore = greedy(Categorical(3), action_mask_key="mask")
    counted, own = drawn(acting(torch.tensor(1), explore, "mask"), rows(mask=mask))
    for actions in (counted, own):
        assert mask.gather(1, actions.unsqueeze(1)).all()
        assert abs((actions != 1).float().mean() - 0.2) < 0.015


def test_epsilon_greedy_of_several_agents() -> None:
    """Each explores for itself."""
    key = ("agents", "action")
    explore = greedy(
        Composite(agents=Composite(action=Categorical(4, (3,)), shape=(3,))), action_key=key
    )
    td = rows().set("agents", TensorDict({}, [ROWS, 3]))
    counted, own = drawn(acting(torch.ones(3).long(), explore, key=key), td, key)
    for actions in (counted, own):
        explored = actions != 1
        assert abs(explored.float().mean() - 0.3) < 0.015
        assert abs(explored.all(1).float().mean() - 0.027) < 0.006


class Biased(AdditiveGaussianModule):
    """Noise of one's own."""

    def _add_noise(self, action: Tensor) -> Tensor:
        return action + 5 + torch.rand(action.shape)


def test_modules_of_ones_own_keep_their_way() -> None:
    explore = Biased(spec=Bounded(-9 * torch.ones(2), 9 * torch.ones(2)))
    counted = CounterPolicy(acting(torch.zeros(2), explore), ExplorationType.RANDOM)
    counted.prepare(rows()[:8])
    assert counted.row_by_row
    words = CounterNoise(0, 8, 1, counted.width).round(0)[:, 0]
    assert (counted(rows()[:8], words)["action"] >= 5).all()


def test_whole_numbers_for_the_noise_are_floats() -> None:
    spec = Bounded(-9 * torch.ones(2), 9 * torch.ones(2))
    explore = AdditiveGaussianModule(spec=spec, mean=0, std=1)
    counted, own = drawn(acting(torch.zeros(2), explore), rows())
    assert len(counted.unique()) > ROWS
    assert (counted.std(0) - own.std(0)).abs().max() < 0.03


class Notes(TensorDictSequential):
    """Notes what would be done without exploration."""

    def forward(self, td: TensorDict, *args: Any, **kwargs: Any) -> TensorDict:
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            best = super().forward(td.clone())["action"]
        return super().forward(td).set("best", best)


def test_a_policy_may_leave_exploration_out() -> None:
    policy = Notes(*acting(torch.tensor(1), greedy(Categorical(4))))
    counted = CounterPolicy(policy, ExplorationType.RANDOM, ["best"])
    counted.prepare(rows()[:8])
    words = CounterNoise(0, ROWS, 1, counted.width).round(0)[:, 0]
    found = counted(rows(), words)
    assert (found["best"] == 1).all()
    assert not (found["action"] == 1).all()


def test_what_doesnt_fit_is_told() -> None:
    wide = acting(torch.zeros(1).long(), greedy(Categorical(3, shape=(3,))))
    masked = greedy(Categorical(3), action_mask_key="mask")
    none, square = torch.zeros(ROWS, 3, dtype=torch.bool), torch.ones(ROWS, 2, dtype=torch.bool)
    for policy, td, said in [
        (wide, rows(), r"have shape \(8, 1\), and the spec .* has \(3,\): they must end alike"),
        (acting(torch.tensor(1), masked, "mask"), rows(mask=none), "allows none of them"),
        (
            acting(torch.tensor(1), masked, "mask"),
            rows(mask=square),
            r"a mask .* of shape \(8, 3\)",
        ),
    ]:
        with pytest.raises(ValueError, match=said):
            CounterPolicy(policy, ExplorationType.RANDOM).prepare(td[:8])
    with pytest.raises(KeyError, match="mask"):
        CounterPolicy(acting(torch.tensor(1), masked), ExplorationType.RANDOM).prepare(rows()[:8])


def test_epsilon_greedy_over_a_box() -> None:
    spec = Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0]))
    counted, own = drawn(acting(torch.zeros(2), greedy(spec)), rows())
    explored = counted[(counted != 0).any(1)]
    assert abs(len(explored) / ROWS - 0.4) < 0.015
    assert (explored >= spec.space.low).all()
    assert (explored <= spec.space.high).all()
    assert (explored.mean(0) - torch.tensor([0.0, 2.0])).abs().max() < 0.05
    assert counted.dtype == own.dtype


def test_noise_that_is_added_and_clipped() -> None:
    explore = AdditiveGaussianModule(
        spec=Bounded(-2 * torch.ones(2), 2 * torch.ones(2)), sigma_init=0.5, std=2.0, mean=0.5
    )
    counted, own = drawn(acting(torch.tensor([0.25, 1.0]), explore), rows())
    assert (counted.dtype, counted.shape) == (own.dtype, own.shape)
    for actions in (counted, own):
        assert actions.abs().max() == 2
        assert (actions.mean(0) - own.mean(0)).abs().max() < 0.03
        assert (actions.std(0) - own.std(0)).abs().max() < 0.03
        assert abs((actions == 2).float().mean() - (own == 2).float().mean()) < 0.01


def test_noise_that_is_correlated() -> None:
    """A step of the process, for rows in which an episode begins and for others."""
    explore = OrnsteinUhlenbeckProcessModule(
        spec=Bounded(-9 * torch.ones(2), 9 * torch.ones(2)),
        theta=2.0,
        dt=0.1,
        sigma=0.5,
        x0=0.25,
        mu=1.0,
    )
    begins = torch.arange(ROWS).unsqueeze(1) % 2 == 0
    td = rows(
        is_init=begins,
        _ou_prev_noise=torch.full((ROWS, 2), 3.0),
        _ou_steps=torch.full((ROWS,), 7),
    )
    action = torch.tensor([0.25, 1.0])
    counted, own = drawn(acting(action, explore), td)
    assert (counted.dtype, counted.shape) == (own.dtype, own.shape)
    for before, first in ((0.25, 0), (3.25, 1)):
        for actions in (counted, own):
            noise = actions[first::2] - action
            expected = before + 2.0 * (1.0 - before) * 0.1
            assert (noise.mean(0) - expected).abs().max() < 0.01
            assert (noise.std(0) - 0.5 * 0.1**0.5).abs().max() < 0.005
    left, _ = drawn(acting(action, explore), td, "_ou_steps")
    assert torch.equal(left, torch.where(begins.squeeze(1), 1, 8))


def test_annealing_reaches_it() -> None:
    explore = EGreedyModule(spec=Categorical(4), eps_init=1.0, eps_end=0.0, annealing_num_steps=10)
    policy = acting(torch.tensor(1), explore)
    counted = CounterPolicy(policy, ExplorationType.RANDOM)
    counted.prepare(rows()[:8])
    words = CounterNoise(0, ROWS, 1, counted.width).round(0)[:, 0]
    assert (counted(rows(), words)["action"] != 1).float().mean() > 0.7
    explore.step(10)
    assert (counted(rows(), words)["action"] == 1).all()


@pytest.mark.parametrize("spec", [Binary(3), Bounded(0, 5, (2,), dtype=torch.int64)])
def test_other_specs_are_drawn_from_row_by_row(spec: TensorSpec) -> None:
    policy = CounterPolicy(
        acting(torch.zeros(spec.shape, dtype=spec.dtype), greedy(spec)), ExplorationType.RANDOM
    )
    policy.prepare(rows()[:8])
    assert policy.row_by_row
