"""A loop that trains without `DelayedGradient` is told so once, and nobody else is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from collectors import end_all, start
from environments import EchoEnv
from evaluating import cart_pole
from policies import categorical
from probe import forget_delayed_gradients
from tensordict import TensorDict
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives import A2CLoss

from torchrl_hts import DelayedGradient, Evaluator, HTSCollector, UndelayedUpdateWarning

pytestmark = [pytest.mark.usefixtures("nothing_left")]

WARNED = UndelayedUpdateWarning


@pytest.fixture(autouse=True)
def _ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No DelayedGradient of another test is still in use."""
    forget_delayed_gradients(monkeypatch)
    yield
    end_all()


def step(policy: nn.Module, batch: TensorDict) -> None:
    """One update: an optimizer step on something."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    sum(p.square().sum() for p in policy.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()


def told(
    policy: nn.Module,
    update: Callable[[HTSCollector, Any], None],
    batches: int = 4,
    **kwargs: Any,
) -> list[warnings.WarningMessage]:
    """The warnings of a loop of so many batches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with start([EchoEnv] * 2, policy, total_frames=8 * batches, **kwargs) as collector:
            for batch in collector:
                update(collector, batch)
    return [warning for warning in caught if warning.category is WARNED]


def plain(policy: nn.Module) -> Callable[[HTSCollector, Any], None]:
    def update(collector: HTSCollector, batch: Any) -> None:
        step(policy, batch)
        collector.update_policy_weights_()

    return update


@pytest.mark.parametrize("lag", [1, 2])
def test_a_plain_loop_is_told_once_where_it_iterates(lag: int) -> None:
    policy = categorical()
    (warning,) = told(policy, plain(policy), lag=lag)
    assert warning.filename == __file__
    for advice in (
        "with delayed(batch)",
        f"lag={lag}",
        "lag=0",
        "gradient_at='newest'",
        "A2C",
        "DQN",
    ):
        assert advice in str(warning.message)


def fused(policy: nn.Module) -> None:
    """An optimizer whose steps autograd's counters don't count."""
    sum(p.square().sum() for p in policy.parameters()).backward()
    torch.optim.Adam(policy.parameters(), lr=1e-2, fused=True).step()
    policy.zero_grad()


def replaced(policy: nn.Module) -> None:
    for parameter in policy.parameters():
        parameter.data = parameter.data + 0.01


@pytest.mark.parametrize("change", [fused, replaced])
def test_updates_that_autograd_does_not_count(change: Callable[[nn.Module], None]) -> None:
    policy = categorical()
    assert len(told(policy, lambda collector, batch: change(policy))) == 1


@pytest.mark.parametrize("change", [fused, replaced])
def test_updates_that_begin_after_some_batches(change: Callable[[nn.Module], None]) -> None:
    policy = categorical()
    seen = 0

    def update(collector: HTSCollector, batch: Any) -> None:
        nonlocal seen
        seen += 1
        if seen >= 5:
            change(policy)

    assert len(told(policy, update, batches=8)) == 1


def test_without_a_lag_there_is_nothing_to_tell() -> None:
    policy = categorical()
    assert not told(policy, plain(policy), lag=0)


def test_evaluation_only() -> None:
    assert not told(categorical(), lambda collector, batch: None)
    assert not told(categorical(), lambda collector, batch: collector.update_policy_weights_())


@pytest.mark.parametrize("gradient_at", ["behaviour", "newest"])
@pytest.mark.parametrize("whole_loss", [False, True])
def test_inside_a_delayed_gradient_of_either_kind(gradient_at: Any, whole_loss: bool) -> None:
    """The advice of the warning, followed."""
    policy = categorical()
    loss_module = A2CLoss(policy, ValueOperator(nn.Linear(4, 1), ["observation"]))
    delayed = DelayedGradient(loss_module if whole_loss else policy, lag=1, gradient_at=gradient_at)

    def update(collector: HTSCollector, batch: Any) -> None:
        with delayed(batch):
            step(policy, batch)
        collector.update_policy_weights_()

    assert not told(policy, update)


def test_one_that_is_made_and_never_entered_delays_nothing() -> None:
    policy = categorical()
    delayed = DelayedGradient(policy, lag=1)
    assert len(told(policy, plain(policy))) == 1
    assert delayed.round == 0


def test_one_of_another_module_does_not_count() -> None:
    policy, other = categorical(), nn.Linear(1, 1)
    delayed = DelayedGradient(other, lag=1)

    def update(collector: HTSCollector, batch: Any) -> None:
        with delayed(batch):
            step(policy, batch)

    assert len(told(policy, update)) == 1


@pytest.mark.parametrize("as_module", [False, True])
def test_a_copy_that_learns(as_module: bool) -> None:
    policy = categorical()
    learner = copy.deepcopy(policy)
    delayed = DelayedGradient(learner, lag=1)

    def weights() -> Any:
        return learner if as_module else TensorDict.from_module(learner).data

    def undelayed_update(collector: HTSCollector, batch: Any) -> None:
        step(learner, batch)
        collector.update_policy_weights_(weights())

    def delayed_update(collector: HTSCollector, batch: Any) -> None:
        with delayed(batch):
            step(learner, batch)
        collector.update_policy_weights_(weights())

    assert len(told(policy, undelayed_update)) == 1
    learner.load_state_dict(policy.state_dict())
    assert not told(policy, delayed_update)


def averaged(policy: nn.Module) -> Callable[[], Any]:
    mean = torch.optim.swa_utils.AveragedModel(policy)

    def weights() -> Any:
        mean.update_parameters(policy)
        return mean.module

    return weights


@pytest.mark.parametrize(
    ("make", "gradient_at", "said"),
    [
        (averaged, "behaviour", 1),
        (averaged, "newest", 0),
        (lambda policy: lambda: copy.deepcopy(policy), "behaviour", 0),
        (lambda policy: lambda: dict(copy.deepcopy(policy).state_dict()), "behaviour", 0),
        (lambda policy: lambda: copy.deepcopy(policy).bfloat16().float(), "behaviour", 0),
    ],
)
def test_others_act_than_the_policy_that_is_delayed(make: Any, gradient_at: Any, said: int) -> None:
    policy = categorical()
    weights, delayed = make(policy), DelayedGradient(policy, lag=1, gradient_at=gradient_at)

    def update(collector: HTSCollector, batch: Any) -> None:
        with delayed(batch):
            step(policy, batch)
        collector.update_policy_weights_(weights())

    found = told(policy, update, batches=8)
    assert len(found) == said
    for warning in found:
        assert warning.filename == __file__
        assert "rounds act with the weights that update_policy_weights_" in str(warning.message)


def test_weights_that_are_given_before_the_first_batch_are_no_update() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", WARNED)
        with start([EchoEnv] * 2, total_frames=24) as collector:
            collector.update_policy_weights_(TensorDict.from_module(categorical(seed=1)).data)
            assert len(list(collector)) == 3


def test_the_parameters_of_a_checkpoint_are_no_update() -> None:
    policy = categorical()
    with start([EchoEnv] * 2, policy, total_frames=32) as collector:
        next(iter(collector))
        state = collector.state_dict()
    other = categorical(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", WARNED)
        with start([EchoEnv] * 2, other, total_frames=32) as collector:
            next(iter(collector))
            collector.load_state_dict(state)
            list(collector)


def test_it_can_be_silenced_and_be_made_an_error() -> None:
    policy = categorical()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=WARNED)
        with start([EchoEnv] * 2, policy, total_frames=24) as collector:
            for batch in collector:
                step(policy, batch)
    with warnings.catch_warnings(), start([EchoEnv] * 2, policy, total_frames=24) as collector:
        warnings.simplefilter("error", WARNED)
        batches = iter(collector)
        step(policy, next(batches))
        with pytest.raises(WARNED):
            next(batches)


def test_a_collector_whose_learner_is_elsewhere() -> None:
    policy = categorical()
    assert not told(policy, plain(policy), worker_idx=0)


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (lambda collector, batches: collector.update_policy_weights_(), "update_policy_weights_"),
        (lambda collector, batches: collector.state_dict(), "state_dict"),
        (lambda collector, batches: next(batches), "the next batch"),
    ],
)
def test_what_is_not_the_newest_is_refused_as_such(does: Any, what: str) -> None:
    """In the block the policy has the parameters of the batch (I2)."""
    policy = categorical()
    delayed = DelayedGradient(policy, lag=1)
    with start([EchoEnv] * 2, policy, total_frames=40) as collector:
        batches = iter(collector)
        with delayed(next(batches)), pytest.raises(RuntimeError, match=f"{what}.*after the block"):
            does(collector, batches)


@pytest.mark.parametrize("as_module", [False, True])
def test_what_a_copy_has_in_the_block_is_refused_too(as_module: bool) -> None:
    policy = categorical()
    learner = copy.deepcopy(policy)
    delayed = DelayedGradient(learner, lag=1)
    weights = learner if as_module else TensorDict.from_module(learner).data
    with start([EchoEnv] * 2, policy, total_frames=40) as collector:
        batches = iter(collector)
        with delayed(next(batches)):
            with pytest.raises(RuntimeError, match=r"update_policy_weights_.*after the block"):
                collector.update_policy_weights_(weights)
            collector.update_policy_weights_(copy.deepcopy(learner))  # which nobody delays


def test_an_evaluation_of_what_is_not_the_newest_is_refused() -> None:
    policy = categorical(num_actions=2)
    delayed, learner = DelayedGradient(policy, lag=1), copy.deepcopy(policy)
    with Evaluator(cart_pole, policy, num_episodes=1) as evaluator:
        with delayed, pytest.raises(RuntimeError, match=r"submit was called.*after the block"):
            evaluator.submit(0)
        with DelayedGradient(learner, lag=1):  # another's
            evaluator.submit(1)
        assert [found.step for found in evaluator.wait()] == [1]


def test_in_a_block_that_moves_nothing_it_is_the_newest() -> None:
    policy = categorical()
    delayed = DelayedGradient(policy, lag=1, gradient_at="newest")
    with start([EchoEnv] * 2, policy, total_frames=40) as collector:
        for batch in collector:
            with delayed(batch):
                step(policy, batch)
                collector.update_policy_weights_()


@pytest.mark.parametrize(("lag", "its"), [(0, 1), (2, 1), (1, 0)])
def test_a_lag_other_than_the_collectors_is_told(lag: int, its: int) -> None:
    policy = categorical()
    delayed = DelayedGradient(policy, lag=its)
    collector = start([EchoEnv] * 2, policy, total_frames=80, lag=lag)
    batches = iter(collector)
    with delayed(next(batches)):
        step(policy, {})
    with pytest.raises(ValueError, match=f"has lag={its}, and the collector lag={lag}"):
        next(batches)


def test_a_delayed_gradient_of_a_run_before_is_not_looked_at() -> None:
    policy = categorical()
    kept = []
    for lag in (1, 0, 2):
        delayed = DelayedGradient(policy, lag=lag)
        kept.append(delayed)
        with start([EchoEnv] * 2, policy, total_frames=40, lag=lag) as collector:
            for batch in collector:
                with delayed(batch):
                    step(policy, batch)
    assert len(kept) == 3


def test_a_state_that_is_kept_stays_as_it_was() -> None:
    policy = categorical()
    with start([EchoEnv] * 2, policy, total_frames=40, lag=0) as collector:
        batches = iter(collector)
        next(batches)
        state = collector.state_dict()
        before = copy.deepcopy(state["policy_state_dict"])
        for batch in batches:
            step(policy, batch)
    assert all(
        torch.equal(value, before[name]) for name, value in state["policy_state_dict"].items()
    )
