"""The collector and the delayed gradient together, in a bare loop and in TorchRL's trainers."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.checkpoint import Checkpoint
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss, PPOLoss
from torchrl.objectives.value import GAE, TDLambdaEstimator
from torchrl.trainers import DefaultOptimizationStepper, Trainer, UpdateWeights
from torchrl.trainers.algorithms import A2CTrainer, PPOTrainer

from torchrl_hts import DelayedGradient, HTSCollector
from torchrl_hts.testing import digest

pytestmark = pytest.mark.usefixtures("nothing_left")

NUM_ENVS, ALPHA, ROUNDS = 4, 8, 5


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    policy = ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[16]), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return policy, ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation"])


def collect(policy: nn.Module, lag: int = 1, **kwargs: Any) -> HTSCollector:
    return HTSCollector(
        [partial(gym.make, "CartPole-v1")] * NUM_ENVS,
        policy,
        frames_per_batch=NUM_ENVS * ALPHA,
        total_frames=NUM_ENVS * ALPHA * ROUNDS,
        lag=lag,
        seed=0,
        **kwargs,
    )


@torch.no_grad()
def distance(policy: nn.Module, batch: TensorDictBase) -> float:
    """How far the policy's log-probabilities are from those that the batch was taken with."""
    log_prob = policy.get_dist(batch.copy()).log_prob(batch["action"])
    return (log_prob - batch["action_log_prob"]).abs().max().item()


def train(
    loss_class: type, lag: int, *, epochs: int = 1, minibatches: int = 1, estimator: str = "gae"
) -> tuple[list[str], list[float]]:
    """The README's loop, actor and critic delayed: digests of the batches, the ratios off 1."""
    policy, critic = models()
    loss_module = loss_class(policy, critic)
    make = {
        "gae": partial(GAE, gamma=0.99, lmbda=0.95),
        "td": partial(TDLambdaEstimator, gamma=0.99, lmbda=0.9),
    }
    advantage = make[estimator](value_network=critic)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, ROUNDS)
    delayed = DelayedGradient(loss_module, lag=lag)
    digests, distances = [], []
    with collect(policy, lag) as collector:
        for batch in collector:
            digests.append(digest(batch))
            with delayed(batch):
                distances.append(distance(policy, batch))
                for _ in range(epochs):
                    advantage(batch)
                    for rows in batch.reshape(-1).split(NUM_ENVS * ALPHA // minibatches):
                        losses = loss_module(rows)
                        sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
                        nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                        optimizer.step()
                        optimizer.zero_grad()
            schedule.step()
            collector.update_policy_weights_()
    return [*digests, digest(loss_module.parameters())], distances


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize(
    ("loss_class", "kwargs"),
    [
        (A2CLoss, {}),
        (A2CLoss, {"estimator": "td"}),
        (ClipPPOLoss, {"epochs": 2, "minibatches": 4}),
        (KLPENPPOLoss, {"epochs": 2}),
        (PPOLoss, {"minibatches": 2}),
    ],
)
def test_every_loss_in_the_bare_loop(loss_class: type, kwargs: dict[str, Any], lag: int) -> None:
    """Inside the block the parameters are those that took the batch's actions (I2, I3)."""
    digests, distances = train(loss_class, lag, **kwargs)
    assert max(distances) < 1e-5
    assert (digests, distances) == train(loss_class, lag, **kwargs)
    assert len(set(digests)) == ROUNDS + 1


def test_without_the_delayed_gradient_the_loop_trains_off_policy_by_one_update() -> None:
    policy, critic = models()
    loss_module = A2CLoss(policy, critic)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.SGD(loss_module.parameters(), lr=0.5)
    distances = []
    with collect(policy) as collector:
        for batch in collector:
            distances.append(distance(policy, batch))
            advantage(batch)
            losses = loss_module(batch.reshape(-1))
            sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert distances[0] < 1e-5
    assert min(distances[1:]) > 1e-3


def test_another_rounds_batch_is_refused() -> None:
    policy, critic = models()
    delayed = DelayedGradient(A2CLoss(policy, critic))
    with collect(policy) as collector:
        batches = iter(collector)
        next(batches)
        skipped = next(batches)
        with pytest.raises(ValueError, match="round"), delayed(skipped):
            pass


def buffer(minibatches: int) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(NUM_ENVS * ALPHA),
        sampler=SamplerWithoutReplacement(),
        batch_size=NUM_ENVS * ALPHA // minibatches,
    )


def make_trainer(
    kind: str, collector: HTSCollector, policy: nn.Module, critic: nn.Module
) -> Trainer:
    loss_class = ClipPPOLoss if kind == "ppo" else A2CLoss
    loss_module = loss_class(policy, critic)
    common = {
        "collector": collector,
        "total_frames": collector.total_frames,
        "frame_skip": 1,
        "loss_module": loss_module,
        "optimizer": torch.optim.Adam(loss_module.parameters(), lr=1e-2),
        "progress_bar": False,
        "clip_norm": 0.5,
    }
    if kind == "a2c":
        return A2CTrainer(**common, optim_steps_per_batch=1)
    if kind == "ppo":
        return PPOTrainer(
            **common, optim_steps_per_batch=None, num_epochs=2, replay_buffer=buffer(4)
        )
    trainer = Trainer(
        **common, optim_steps_per_batch=1, optimization_stepper=DefaultOptimizationStepper()
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    trainer.register_op("batch_process", advantage)
    trainer.register_op("process_optim_batch", lambda batch: batch.reshape(-1))
    UpdateWeights(collector, 1).register(trainer)
    return trainer


def test_the_policy_alone_is_delayed() -> None:
    """The critic learns as without lag: inside the block, too, it is the newest."""
    policy, critic = models()
    loss_module = A2CLoss(policy, critic)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.SGD(loss_module.parameters(), lr=0.5)
    delayed = DelayedGradient(policy)
    moved = []
    with collect(policy) as collector:
        for batch in collector:
            newest = digest(policy.parameters())
            value = digest(critic.parameters())
            with delayed(batch):
                assert distance(policy, batch) < 1e-5
                assert digest(critic.parameters()) == value
                moved.append(digest(policy.parameters()) != newest)
                advantage(batch)
                losses = loss_module(batch.reshape(-1))
                sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
                optimizer.step()
                optimizer.zero_grad()
                value = digest(critic.parameters())
            assert digest(critic.parameters()) == value
    assert moved == [False, *[True] * (ROUNDS - 1)]


@pytest.mark.parametrize("policy_alone", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "a2c", "ppo"])
def test_torchrls_trainers(kind: str, lag: int, policy_alone: bool) -> None:
    """All rounds are trained on, at the parameters that took them, and reproducibly."""

    def run() -> str:
        policy, critic = models()
        seen = []
        with collect(policy, lag) as collector:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer = make_trainer(kind, collector, policy, critic)
            delayed = DelayedGradient(policy if policy_alone else trainer.loss_module)
            delayed.register(trainer)

            def check(batch: Any) -> None:
                seen.append(distance(policy, batch))

            trainer.register_op("pre_epoch_log", check)
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.train()
            assert delayed.round == ROUNDS
        assert len(seen) == ROUNDS * (2 if kind == "ppo" else 1)
        first_of_each = seen[:: 2 if kind == "ppo" else 1]
        assert max(first_of_each) < 1e-5
        return digest(trainer.loss_module.parameters())

    assert run() == run()


@pytest.mark.parametrize("form", ["file", "checkpoint"])
def test_a_trainers_checkpoint_goes_on_bit_for_bit(form: str, tmp_path: Path) -> None:
    """In the middle of the run, as TorchRL's Trainer writes and reads it."""

    def run(rounds: int, *, load: bool = False) -> str:
        policy, critic = models()
        with collect(policy) as collector, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = make_trainer("plain", collector, policy, critic)
            DelayedGradient(trainer.loss_module).register(trainer)
            trainer.checkpoint = Checkpoint() if form == "checkpoint" else None
            trainer.save_trainer_file = tmp_path / "trainer"  # written when the run ends
            trainer.total_frames = rounds * NUM_ENVS * ALPHA
            if load:
                trainer.load_from_file(tmp_path / "trainer")
            trainer.train()
            assert trainer.collected_frames == trainer.total_frames
        return digest(trainer.loss_module.parameters())

    whole = run(ROUNDS)
    assert run(2) != whole
    assert run(ROUNDS, load=True) == whole
