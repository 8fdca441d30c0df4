"""DelayedGradient against the slow delayed_gradient_reference.py, and its contract."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from delayed_gradient_reference import (
    Values,
    adam,
    clip,
    make_batch,
    make_loss,
    minibatches,
    put,
    reference,
    rmsprop,
    sgd,
    snapshot,
    total_loss,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.objectives import ClipPPOLoss, DQNLoss

from torchrl_hts.delayed_gradient import DelayedGradient

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[[], Any]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.05), sgd),
    "sgd_momentum": (lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), lambda: sgd(0.9)),
    "sgd_decay": (lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1), lambda: sgd(0.0, 0.1)),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, 0.05), rmsprop),
    "adam": (lambda p: torch.optim.Adam(p, 0.05), adam),
    "adamw": (lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1), lambda: adam(0.1)),
}
PPO = {"epochs": 2, "num_minibatches": 3}


class Learner:
    """The user's loop, with `delayed` around each batch; without it, plain training."""

    def __init__(
        self,
        loss_name: str = "a2c",
        optimizer: str = "adam",
        *,
        lag: int | None = 1,
        gradient_at: Any = "behaviour",
        plain: bool = False,
        epochs: int = 1,
        num_minibatches: int = 1,
        max_norm: float | None = None,
        schedule: Callable[[int], float] = lambda j: 1.0,
        **loss_options: Any,
    ) -> None:
        self.dtype = loss_options.get("dtype", torch.float64)
        self.loss_module, self.advantage = make_loss(loss_name, **loss_options)
        self.optimizer = OPTIMIZERS[optimizer][0](self.loss_module.parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)
        self.parts = (epochs, num_minibatches)
        self.max_norm = max_norm
        self.delayed = DelayedGradient(self.loss_module, lag=lag, gradient_at=gradient_at)
        self.plain = plain

    def train_batch(self, batch: TensorDict) -> None:
        for minibatch in minibatches(batch, self.advantage, *self.parts):
            total_loss(self.loss_module, minibatch).backward()
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(self.loss_module.parameters(), self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.schedule.step()

    def run(self, start: int, stop: int) -> list[Values]:
        """Newest parameters after each of the rounds from `start` to before `stop`."""
        after = []
        for j in range(start, stop):
            batch = make_batch(j, self.dtype)
            if self.plain:
                self.train_batch(batch)
            else:
                with self.delayed(batch):
                    self.train_batch(batch)
            after.append(snapshot(self.loss_module))
        return after

    def state(self) -> dict[str, Any]:
        parts = ("loss_module", "optimizer", "schedule", "delayed")
        return {part: getattr(self, part).state_dict() for part in parts}

    def load(self, state: dict[str, Any]) -> None:
        for part, value in state.items():
            getattr(self, part).load_state_dict(value)


def distance(left: list[Values], right: list[Values]) -> float:
    pairs = zip(left, right, strict=True)
    return max(float((a - b).abs().max()) for x, y in pairs for a, b in zip(x, y, strict=True))


def same_bits(left: list[Values], right: list[Values]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_follows_the_recursion(optimizer, lag, max_norm):  # I3
    expected = reference(
        "a2c", OPTIMIZERS[optimizer][1](), lag=lag, rounds=6, max_norm=max_norm, num_minibatches=2
    )
    learner = Learner("a2c", optimizer, lag=lag, max_norm=max_norm, num_minibatches=2)
    assert distance(learner.run(0, 6), expected[lag + 1 :]) < 1e-10


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("loss", ["a2c", "ppo_clip"])
def test_losses_with_epochs_clipping_and_a_schedule_follow_the_recursion(loss, lag, shared):  # I3
    parts = PPO if loss == "ppo_clip" else {}
    options = {"lag": lag, "shared": shared, "max_norm": 0.1, **parts}
    expected = reference(
        loss, adam(), rounds=5, learning_rate=lambda j: 0.05 * (1 - j / 10), **options
    )
    learner = Learner(loss, "adam", schedule=lambda j: 1 - j / 10, **options)
    assert distance(learner.run(0, 5), expected[lag + 1 :]) < 1e-10


@pytest.mark.parametrize("loss", ["ppo_kl", "ppo"])
def test_other_ppo_losses_follow_the_recursion(loss):
    expected = reference(loss, adam(), lag=1, rounds=4, **PPO)
    assert distance(Learner(loss, lag=1, **PPO).run(0, 4), expected[2:]) < 1e-10


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_gradients_at_the_newest_parameters_give_another_result(optimizer):
    rule = OPTIMIZERS[optimizer][1]
    delayed = Learner("a2c", optimizer, lag=1).run(0, 6)
    at_newest = reference("a2c", rule(), lag=1, rounds=6, newest=True)[2:]
    assert distance(delayed[:1], at_newest[:1]) < 1e-10  # round 0 knows no other parameters
    assert distance(delayed, at_newest) > 1e-4
    assert distance(delayed, Learner("a2c", optimizer, lag=2).run(0, 6)) > 1e-4
    option = Learner("a2c", optimizer, lag=1, gradient_at="newest").run(0, 6)
    assert distance(option, at_newest) < 1e-10


@pytest.mark.parametrize("options", [{"lag": 0}, {"lag": 1, "gradient_at": "newest"}])
@pytest.mark.parametrize("loss", ["a2c", "ppo_clip"])
def test_nothing_to_delay_is_bitwise_the_plain_loop(loss, options):
    settings_ = {"max_norm": 0.1, "shared": True, "dtype": torch.float32, **PPO}
    plain = Learner(loss, plain=True, **settings_)
    delayed = Learner(loss, **options, **settings_)
    assert same_bits(plain.run(0, 4), delayed.run(0, 4))
    assert delayed.delayed.round == 4


def test_separate_losses_and_shared_trunk_follow_in_place():
    # The critic then reads the trunk through detached buffers that are views of the parameters.
    learner = Learner("ppo_clip", lag=1, shared=True, separate_losses=True)
    learner.run(0, 2)
    loss_module = learner.loss_module
    with learner.delayed:
        names = dict(loss_module.named_buffers())
        views = [n for n in names if n.startswith("critic_network_params")]
        assert views
        for name in views:
            parameter = loss_module.get_parameter(name.replace("critic", "actor"))
            assert torch.equal(names[name], parameter)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_first_minibatch_of_ppo_is_on_policy(lag):  # I2
    learner = Learner("ppo_clip", lag=lag, **PPO)
    loss_module, actor = learner.loss_module, learner.loss_module.actor_network
    theta = [snapshot(loss_module)] * (lag + 1)
    for j in range(5):
        batch = make_batch(j)
        behaviour = make_loss("ppo_clip")[0]
        with torch.no_grad():
            put(behaviour, theta[j])
            with behaviour.actor_network_params.to_module(behaviour.actor_network):
                distribution = behaviour.actor_network.get_dist(batch)
            batch["action_log_prob"] = distribution.log_prob(batch["action"])
        if j > 0 and lag > 0:
            assert ratio_error(loss_module, actor, batch) > 1e-4  # control: at the newest
        with learner.delayed(batch):
            assert ratio_error(loss_module, actor, batch) < 1e-12
            assert same_bits([snapshot(loss_module)], [theta[j]])
            learner.train_batch(batch)
        theta.append(snapshot(loss_module))


def ratio_error(loss_module: ClipPPOLoss, actor: nn.Module, batch: TensorDict) -> float:
    """Largest deviation of the policy's ratio from 1, with the parameters of the moment."""
    with torch.no_grad(), loss_module.actor_network_params.to_module(actor):
        log_prob = actor.get_dist(batch).log_prob(batch["action"])
    return float(((log_prob - batch["action_log_prob"]).exp() - 1).abs().max())


def test_advantages_bootstrap_with_the_stored_values_parameters():
    """GAE, written out, with theta_j's critic for both kinds of values (a fault of the release)."""
    learner = Learner("a2c", lag=1)
    theta_2, _ = learner.run(0, 2)
    batch = make_batch(2)
    with learner.delayed(batch):
        learner.advantage(batch)
    *_, w0, b0, w1, b1 = theta_2  # the critic's two layers

    def value(observation: torch.Tensor) -> torch.Tensor:
        return torch.tanh(observation @ w0.T + b0) @ w1.T + b1

    here, there = value(batch["observation"]), value(batch["next", "observation"])
    live = ~batch["next", "terminated"]
    delta = batch["next", "reward"] + 0.9 * there * live - here
    advantage = torch.zeros_like(delta)
    running = torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        running = delta[:, t] + 0.9 * 0.8 * live[:, t] * running
        advantage[:, t] = running
    torch.testing.assert_close(batch["state_value"], here)
    # torchrl keeps gamma and lambda in single precision.
    torch.testing.assert_close(batch["advantage"], advantage, rtol=0, atol=1e-5)


def test_entropy_is_rewarded():
    """With no advantage the policy must become more random, round by round (another fault)."""
    learner = Learner("a2c", "sgd", lag=1)
    learner.loss_module.entropy_coeff = 1.0
    entropies = []
    for _ in range(8):
        batch = make_batch(0)
        batch["advantage"] = torch.zeros(*batch.shape, 1, dtype=torch.float64)
        batch["value_target"] = torch.zeros_like(batch["advantage"])
        with learner.delayed:
            losses = learner.loss_module(batch)
            (losses["loss_objective"] + losses["loss_entropy"]).backward()
            learner.optimizer.step()
            learner.optimizer.zero_grad()
        entropies.append(float(learner.loss_module(batch)["entropy"]))
    assert entropies[-1] > entropies[0] + 1e-3
    assert entropies == sorted(entropies)


def test_reference_clips_every_gradient():
    """Every step: the equalities above would miss a fault that the reference shares."""
    gradients = [torch.full((4,), 3.0), torch.full((4,), 4.0)]
    clipped = clip(gradients, 1.0)
    torch.testing.assert_close(torch.cat(clipped).norm(), torch.tensor(1.0))
    unclipped = Learner("ppo_clip", "sgd", lag=1, **PPO).run(0, 3)
    learner = Learner("ppo_clip", "sgd", lag=1, max_norm=0.01, **PPO)
    start = snapshot(learner.loss_module)
    moved = distance(learner.run(0, 1), [start])
    assert moved <= 0.05 * 0.01 * 6 < distance(unclipped[:1], [start])  # lr * norm * steps


def test_parameters_that_share_memory_are_moved_once():
    module = nn.ParameterDict({"a": torch.ones(1), "tied": torch.zeros(1)})
    module["tied"].data = module["a"].data
    delayed = DelayedGradient(module, lag=1)
    found = []
    for _ in range(3):
        with delayed, torch.no_grad():
            module["a"].mul_(0.5)
        found.append(module["a"].item())
    # theta_0 = theta_1 = 1; theta_{j+2} = theta_{j+1} - theta_j / 2
    assert found == [0.5, 0.0, -0.25]


def delayed_actor() -> nn.Module:
    return make_loss("ppo_clip", delay_actor=True)[0]


def delayed_value() -> nn.Module:
    network = TensorDictModule(nn.Linear(3, 2), ["observation"], ["action_value"])
    return DQNLoss(network, action_space="categorical", delay_value=True)


@pytest.mark.parametrize("make", [delayed_actor, delayed_value])
def test_target_networks_are_not_moved(make):
    loss_module = make()
    targets = [b for name, b in loss_module.named_buffers() if name.startswith("target_")]
    assert targets
    delayed = DelayedGradient(loss_module, lag=1)
    for _ in range(4):
        before = [target.clone() for target in targets]
        with delayed, torch.no_grad():
            assert same_bits([targets], [before])
            for tensor in (*loss_module.parameters(), *targets):  # a step, and a target update
                tensor.add_(1.0)
        assert same_bits([targets], [[value + 1.0 for value in before]])
    assert delayed.round == 4


@pytest.mark.parametrize("gradient_at", ["behaviour", "newest"])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_state_continues_bit_for_bit(lag, gradient_at):
    options = {"lag": lag, "gradient_at": gradient_at, "dtype": torch.float32, "shared": True}
    whole = Learner("a2c", **options).run(0, 6)
    for saved_at in range(5):
        file = io.BytesIO()
        first = Learner("a2c", **options)
        first.run(0, saved_at)
        torch.save(first.state(), file)
        file.seek(0)
        second = Learner("a2c", **options)
        second.load(torch.load(file, weights_only=True))
        assert second.delayed.round == saved_at
        assert same_bits(second.run(saved_at, 6), whole[saved_at:])


def test_state_is_a_copy_and_loads_in_any_order():
    learner = Learner("a2c", lag=2)
    learner.run(0, 3)
    state = learner.delayed.state_dict()
    held = copy.deepcopy(state)
    weights = copy.deepcopy(learner.loss_module.state_dict())
    learner.run(3, 6)
    ring = [key for key in state if key.startswith("ring.")]
    assert len(ring) == 2 * len(list(learner.loss_module.parameters()))
    assert all(torch.equal(state[key], held[key]) for key in ring)
    other = Learner("a2c", "sgd", lag=2)
    other.delayed.load_state_dict(state)
    other.loss_module.load_state_dict(weights)
    with other.delayed:
        behaviour = [held[f"ring.0.{name}"] for name, _ in other.loss_module.named_parameters()]
        assert same_bits([snapshot(other.loss_module)], [behaviour])


@pytest.mark.parametrize(
    "change",
    [
        {"lag": 2},
        {"gradient_at": "newest"},
        {"ring.0.unknown": torch.zeros(1)},
        {"ring.0.actor_network_params.module.0.module.0.bias": torch.zeros(7)},
        {"ring.0.actor_network_params.module.0.module.0.bias": None},
    ],
)
def test_state_of_something_else_is_refused(change):
    learner = Learner("a2c", lag=1)
    learner.run(0, 2)
    state = {**learner.delayed.state_dict(), **change}
    state = {key: value for key, value in state.items() if value is not None}
    fresh = Learner("a2c", lag=1)
    with pytest.raises(ValueError, match=r"lag 2|'newest'|ring\.0"):
        fresh.delayed.load_state_dict(state)
    assert fresh.delayed.round == 0  # nothing was half loaded
    fresh.run(0, 1)


def test_weights_loaded_before_the_first_block_count():
    learner, other, untouched = (Learner("a2c", lag=2) for _ in range(3))
    for module in (learner.loss_module, other.loss_module):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1.0)
    other.delayed = DelayedGradient(other.loss_module, lag=2)
    after = learner.run(0, 4)
    assert same_bits(after, other.run(0, 4))
    assert distance(after, untouched.run(0, 4)) > 0.1


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


@pytest.mark.parametrize("value", [None, "2"])
def test_batch_without_a_version_is_refused(value):
    batch = make_batch(0).exclude("policy_version")
    if value is not None:
        batch.set_non_tensor("policy_version", value)
    with pytest.raises(KeyError, match="policy_version"):
        Learner().delayed(batch)


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
    [(-1, ValueError), (1.0, TypeError), ("1", TypeError), (True, TypeError)],
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
