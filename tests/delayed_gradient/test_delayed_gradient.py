"""DelayedGradient against the slow delayed_gradient_reference.py."""

from __future__ import annotations

import pytest
import torch
from delayed_gradient_reference import adam, clip, make_batch, make_loss, put, reference, snapshot
from delayed_learner import OPTIMIZERS, PPO, Learner, distance, same_bits
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.objectives import ClipPPOLoss, DQNLoss

from torchrl_hts.delayed_gradient import DelayedGradient

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


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
