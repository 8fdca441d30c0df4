"""The contract of DelayedGradient's blocks: failed rounds, wrong batches, and changed modules."""

from __future__ import annotations

import pytest
import torch
from delayed_gradient_reference import make_batch, snapshot
from delayed_learner import Learner, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchrl_hts.delayed_gradient import DelayedGradient

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


@settings(max_examples=40, deadline=None)
@given(
    lag=st.integers(0, 4),
    events=st.lists(st.sampled_from(["round", "round", "failure", "reload"]), max_size=15),
)
def test_any_order_of_rounds_failures_and_reloads(lag, events):
    """theta_{j+lag+1} = theta_{j+lag} - theta_j / 2, exact in binary, whatever happens between."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    delayed = DelayedGradient(model, lag=lag)
    theta = [1.0] * (lag + 1)
    for event in events:
        j = len(theta) - lag - 1
        assert (delayed.round, model.weight.item()) == (j, theta[j + lag])
        if event == "reload":
            state = delayed.state_dict()
            delayed = DelayedGradient(model, lag=lag)
            delayed.load_state_dict(state)
            continue
        try:
            with delayed, torch.no_grad():
                assert model.weight.item() == theta[j]
                model.weight.mul_(0.5)
                if event == "failure":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            continue
        theta.append(theta[j + lag] - theta[j] / 2)


def test_two_that_move_the_same_parameters_are_refused():
    """One within the other, and in turns; one that takes over, or that moves nothing, is not."""
    trunk = nn.Linear(2, 2)
    policy, critic = (nn.Sequential(trunk, nn.Linear(2, 1)) for _ in range(2))
    said = r"move some of the same parameters: .*ModuleList\(\[policy, critic\]\)"
    first, second = DelayedGradient(policy), DelayedGradient(critic)
    with first, pytest.raises(RuntimeError, match=said), second:
        pass
    with second:  # alone from here on
        pass
    with second:
        pass
    with pytest.raises(RuntimeError, match=said), first:
        pass
    newest = DelayedGradient(policy, gradient_at="newest")
    for _ in range(2):
        with second, newest:
            pass
    both = DelayedGradient(nn.ModuleList([policy, critic]))
    for _ in range(2):
        with both:
            pass


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("gradient_at", ["behaviour", "newest"])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("failing_round", [0, 3])
def test_a_failed_round_is_undone_and_can_be_tried_again(lag, gradient_at, error, failing_round):
    options = {"lag": lag, "gradient_at": gradient_at}
    expected = Learner("a2c", "sgd", **options).run(0, 5)
    learner = Learner("a2c", "sgd", **options)
    before = learner.run(0, failing_round)
    newest = snapshot(learner.loss_module)
    batch = make_batch(failing_round)

    def failing() -> None:
        with learner.delayed(batch):
            learner.train_batch(batch)
            raise error

    with pytest.raises(error):
        failing()
    assert same_bits([snapshot(learner.loss_module)], [newest])
    assert learner.delayed.round == failing_round
    assert same_bits(before + learner.run(failing_round, 5), expected)


def test_leaving_the_loop_from_the_block_counts_the_round():
    learner = Learner("a2c", lag=1)
    for j in range(3):
        with learner.delayed(make_batch(j)):
            if j == 1:
                break
    assert learner.delayed.round == 2


@pytest.mark.parametrize(
    ("version", "found"),
    [
        (torch.full((4, 6), 0), "found 0"),
        (torch.full((4, 6), 3), "found 3"),
        (torch.tensor([[2] * 6] * 3 + [[2] * 5 + [3]]), "found 2, 3"),
    ],
)
def test_batch_of_another_round_is_refused(version, found):  # I3
    learner = Learner("a2c", lag=1)
    learner.run(0, 2)
    newest = snapshot(learner.loss_module)
    batch = make_batch(2)
    batch["policy_version"] = version
    with pytest.raises(ValueError, match=f"expected a batch of policy version 2, {found}"):
        learner.delayed(batch)
    assert same_bits([snapshot(learner.loss_module)], [newest])
    with learner.delayed:  # unchecked
        learner.train_batch(batch)
    assert learner.delayed.round == 3


@pytest.mark.parametrize("value", [None, "2", torch.zeros(4, 6), torch.zeros(4, 6).bool()])
def test_batch_without_a_version_is_refused(value):
    batch = make_batch(0).exclude("policy_version")
    if isinstance(value, str):
        batch.set_non_tensor("policy_version", value)
    elif value is not None:
        batch["policy_version"] = value
    with pytest.raises(KeyError, match=r"an integer tensor .*policy_version"):
        Learner().delayed(batch)


@pytest.mark.parametrize("value", [None, {}, torch.zeros(4, 6)])
def test_what_is_no_batch_is_refused(value):
    with pytest.raises(TypeError, match="expected a batch, which is a TensorDict, and got"):
        Learner().delayed(value)


def test_a_batch_of_nothing_is_refused():
    batch = make_batch(0)
    masked = batch.clone()
    masked["collector", "mask"] = torch.zeros(4, 6, dtype=torch.bool)
    for nothing in (batch[:0], masked):
        with pytest.raises(ValueError, match="no step: train on whole rounds"):
            Learner().delayed(nothing)


def test_version_of_padding_is_not_looked_at():
    batch = make_batch(0)
    valid = torch.ones(4, 6, dtype=torch.bool)
    valid[2, 4:] = False
    batch["policy_version"][2, 4:] = 7
    delayed = Learner().delayed
    with pytest.raises(ValueError, match="found 0, 7"):
        delayed(batch)
    batch["collector", "mask"] = valid
    assert delayed(batch) is delayed


def test_blocks_do_not_nest():
    learner = Learner("a2c", lag=1)
    learner.run(0, 2)
    with learner.delayed:
        inside = snapshot(learner.loss_module)
        for call in (
            learner.delayed.__enter__,
            learner.delayed.state_dict,
            lambda: learner.delayed.load_state_dict({}),
        ):
            with pytest.raises(RuntimeError, match=r"nest|inside the block"):
                call()
        assert same_bits([snapshot(learner.loss_module)], [inside])
    assert learner.delayed.round == 3


@pytest.mark.parametrize(
    ("lag", "error"),
    [(-1, ValueError), (1.5, TypeError), ("1", TypeError), (True, TypeError)],
)
def test_lag_must_be_a_count(lag, error):
    with pytest.raises(error, match="lag must be"):
        DelayedGradient(nn.Linear(1, 1), lag=lag)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Tanh(),), ValueError, "no parameters"),
        ((lambda batch: batch,), TypeError, "expected a module"),
    ],
)
def test_loss_module_must_have_parameters(arguments, error, message):
    with pytest.raises(error, match=message):
        DelayedGradient(*arguments)


def test_gradient_at_must_be_known():
    with pytest.raises(ValueError, match="'behaviour', 'newest'"):
        DelayedGradient(nn.Linear(1, 1), gradient_at="theta")
    assert DelayedGradient(nn.Linear(1, 1)).lag == 1


def test_lazy_parameters_are_named():
    model = nn.Sequential(nn.LazyLinear(2))
    delayed = DelayedGradient(model, lag=1)
    state = {**delayed.state_dict(), "round": 1}
    for call in (delayed.__enter__, lambda: delayed.load_state_dict(state)):
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias"):
            call()
    model(torch.zeros(1, 3))
    with delayed:
        pass
    assert delayed.round == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
        lambda model: model.append(nn.Linear(1, 1)),
        lambda model: setattr(model[0], "bias", None),
        lambda model: model.double(),
    ],
    ids=["replaced", "added", "removed", "dtype"],
)
def test_changed_set_of_parameters_is_refused(change):
    model = nn.Sequential(nn.Linear(2, 1))
    delayed = DelayedGradient(model, lag=1)
    with delayed:
        pass
    change(model)
    with pytest.raises(RuntimeError, match=r"the last round: [01]\.(weight|bias)"):
        delayed.__enter__()
    fresh = DelayedGradient(model, lag=1)
    change(model)  # before the first round all is open
    with fresh:
        pass
    assert fresh.round == 1


def test_a_graph_does_not_cross_the_edge_of_a_block():
    # Values are written under the version counters, so that a late backward isn't silently wrong.
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    delayed = DelayedGradient(model, lag=1)
    before = model(torch.ones(1, 1)).sum()
    with delayed:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
        inside = model(torch.ones(1, 1)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        inside.backward()


@pytest.mark.parametrize("mask", [[0.0, -torch.inf], [True, False]])
def test_frozen_masks_stay_as_they_are(mask):
    module = nn.Linear(2, 2)
    module.mask = nn.Parameter(torch.tensor(mask), requires_grad=False)
    delayed = DelayedGradient(module, lag=1)
    for _ in range(3):
        with delayed, torch.no_grad():
            module.weight += 1.0
    assert module.mask.tolist() == mask
    with delayed, torch.no_grad():  # a target network, say, that the block moves
        module.mask.fill_(1)
    assert module.mask.tolist() == [1, 1]


def test_infinite_entries_of_what_is_trained_stay_as_they_are():
    """Their gradient is 0, so that an optimizer leaves them alone; all else is learned."""
    module = nn.Linear(3, 3)
    module.bias = nn.Parameter(torch.tensor([0.0, -1.0, -torch.inf]))
    delayed = DelayedGradient(module, lag=1)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5)
    for _ in range(3):
        with delayed:
            optimizer.zero_grad()
            (1 - module(torch.zeros(1, 3)).softmax(-1)[0, 0]).backward()
            optimizer.step()
    assert module.bias[2] == -torch.inf
    assert module.bias[0] > 1 > -1 > module.bias[1]
    assert module.weight.isfinite().all()


def test_autocast_around_a_block_computes_with_the_parameters_that_are_there():
    """It keeps what it has cast of parameters until its end."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    delayed, one = DelayedGradient(model, lag=1), torch.ones(1, 1)
    for _ in range(2):
        with delayed, torch.no_grad():
            model.weight.mul_(0.5)
    newest = model.weight.item()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(one).item() == newest
        with delayed:
            behaviour = model.weight.item()
            assert model(one).item() == behaviour != newest
        assert model(one).item() == newest
