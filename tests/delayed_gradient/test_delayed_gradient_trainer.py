"""DelayedGradient inside torchrl's trainers: the same rounds as in a bare loop, and checkpoints."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from delayed_gradient_reference import Values, make_batch, make_loss, snapshot
from probe import has_hook, hook_of
from tensordict import TensorDict
from torch import nn
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import BaseCollector
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.trainers import (
    DefaultOptimizationStepper,
    ReplayBufferTrainer,
    Trainer,
    UpdateWeights,
)
from torchrl.trainers.algorithms import A2CTrainer, PPOTrainer
from torchrl.trainers.trainers import ValueEstimatorHook

from torchrl_hts import World
from torchrl_hts.delayed_gradient import DelayedGradient

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")

FRAMES = 24


class FixedBatches(BaseCollector):
    """Yields `make_batch(j)` for j = 0, 1, ..., and keeps the parameters it is told to act with."""

    init_random_frames = 0
    _weight_sync_schemes = None
    seed = 0
    world: World | None = None

    def __init__(self, lag: int, policy: nn.Module) -> None:
        self.lag = lag
        self.policy = policy
        self.round = 0
        self.staged: list[Values] = []

    def iterator(self) -> Iterator[TensorDict]:
        while True:
            batch = make_batch(self.round)
            self.round += 1
            yield batch

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        self.staged.append(snapshot(self.policy))

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        pass

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        return seed

    def state_dict(self) -> OrderedDict[str, Any]:
        return OrderedDict(round=self.round)

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        self.round = int(state_dict["round"])


class CountingAdam(torch.optim.Adam):
    """Keeps the norm of the gradient of every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norms: list[float] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        self.norms.append(float(torch.cat(gradients).norm()))
        return super().step(*args, **kwargs)


def make_trainer(
    kind: str,
    *,
    lag: int = 1,
    rounds: int = 5,
    delayed: bool = True,
    minibatch: int = 6,
    world: World | None = None,
    **options: Any,
) -> Trainer:
    loss_module, advantage = make_loss("a2c" if kind == "a2c" else "ppo_clip", shared=True)
    collector = FixedBatches(lag, loss_module)
    collector.world = world
    common = {
        "collector": collector,
        "total_frames": rounds * FRAMES,
        "frame_skip": 1,
        "loss_module": loss_module,
        "optimizer": CountingAdam(loss_module.parameters(), 0.05),
        "clip_grad_norm": True,
        "clip_norm": 0.1,
        "progress_bar": False,
        **options,
    }
    if kind in ("trainer", "stepper"):
        stepper = DefaultOptimizationStepper() if kind == "stepper" else None
        trainer = Trainer(optim_steps_per_batch=3, optimization_stepper=stepper, **common)
        ValueEstimatorHook(advantage).register(trainer)
        trainer.register_op("post_steps", UpdateWeights(common["collector"], 1))
    else:
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(FRAMES),
            sampler=SamplerWithoutReplacement(),
            batch_size=minibatch,
        )
        trainer_class = {"a2c": A2CTrainer, "ppo": PPOTrainer}[kind]
        epochs = {"ppo": {"num_epochs": 4}, "a2c": {}}[kind]
        # As many steps as there are minibatches: with the number given, torchrl 0.14 leaves the
        # exhausted iterator for the next epoch, which then has no step at all.
        trainer = trainer_class(
            optim_steps_per_batch=None, replay_buffer=buffer, gae=advantage, **epochs, **common
        )
    if delayed:
        DelayedGradient(loss_module).register(trainer)
    return trainer


def make_loss_of(trainer: Trainer) -> nn.Module:
    """The trainer's loss, or another where it has none that is a module."""
    is_module = isinstance(trainer.loss_module, nn.Module)
    return trainer.loss_module if is_module else make_loss()[0]


def same_bits(left: Values, right: Values) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("kind", ["trainer", "stepper", "a2c", "ppo"])
def test_trainers_follow_the_recursion(kind, lag):  # I2, I3
    torch.manual_seed(0)
    trainer = make_trainer(kind, lag=lag)
    loss_module = trainer.loss_module
    initial = snapshot(loss_module)
    inside: list[list[Values]] = []  # per round: before the advantages, after each optimizer step
    trainer.register_op("pre_optim_steps", lambda: inside.append([snapshot(loss_module)]))
    trainer.register_op("post_optim", lambda: inside[-1].append(snapshot(loss_module)))
    trainer.train()
    theta = [initial] * (lag + 1) + trainer.collector.staged  # UpdateWeights saw the newest
    assert hook_of(trainer).lag == lag
    assert hook_of(trainer).round == 5 == len(inside)
    for j, (first, *_, last) in enumerate(inside):
        assert same_bits(first, theta[j])
        for expected, newest, start, end in zip(
            theta[j + lag + 1], theta[j + lag], first, last, strict=True
        ):
            torch.testing.assert_close(expected, newest + (end - start), rtol=0, atol=1e-12)
    assert not same_bits(theta[-1], theta[-2])


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_trainer_and_bare_loop_give_the_same_bits(lag):
    trainer = make_trainer("trainer", lag=lag)
    trainer.train()
    loss_module, advantage = make_loss("ppo_clip", shared=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), 0.05)
    delayed = DelayedGradient(loss_module, lag=lag)
    for j in range(5):
        batch = make_batch(j)
        with delayed(batch):
            advantage(batch)
            for _ in range(3):
                losses = loss_module(batch)
                sum(value for key, value in losses.items() if key.startswith("loss")).backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert same_bits(snapshot(trainer.loss_module), snapshot(loss_module))


@pytest.mark.parametrize("kind", ["trainer", "a2c", "ppo"])
def test_lag_0_is_bitwise_the_trainer_without_it(kind):
    results = []
    for lag, delayed in ((0, True), (0, False), (1, True)):
        torch.manual_seed(0)
        trainer = make_trainer(kind, lag=lag, delayed=delayed)
        trainer.train()
        results.append(snapshot(trainer.loss_module))
    assert same_bits(results[0], results[1])
    assert not same_bits(results[0], results[2])


def test_every_optimizer_step_is_clipped():
    """A fault of the authors' release: the authors' release clips the first of 16 steps only."""
    trainer = make_trainer("ppo", rounds=2)
    trainer.train()
    norms = trainer.optimizer.norms
    assert len(norms) == 2 * 16
    assert max(norms) < 0.1 + 1e-9
    assert sum(norm > 0.0999 for norm in norms) > 16  # it was needed


@pytest.mark.parametrize("form", ["state_dict", "file", "checkpoint"])
@pytest.mark.parametrize("lag", [1, 2])
def test_checkpoints_continue_bit_for_bit(form, lag, tmp_path):
    def make(rounds: int) -> Trainer:
        options: dict[str, Any] = {"checkpoint": Checkpoint()} if form == "checkpoint" else {}
        if form != "state_dict":
            options["save_trainer_file"] = tmp_path / "trainer"
        return make_trainer("trainer", lag=lag, rounds=rounds, **options)

    whole = make(7)
    whole.train()
    first = make(3)
    first.train()
    second = make(7)
    if form == "state_dict":
        second.load_state_dict(first.state_dict())
    else:
        first.save_trainer(force_save=True)
        second.load_from_file(tmp_path / "trainer")
    assert hook_of(second).round == 3
    second.train()
    assert hook_of(second).round == 7
    assert same_bits(snapshot(second.loss_module), snapshot(whole.loss_module))


def test_checkpoint_inside_the_block_is_refused():
    trainer = make_trainer("trainer")
    trainer.register_op("post_optim", lambda: trainer.state_dict())
    with pytest.raises(RuntimeError, match="state_dict inside the block"):
        trainer.train()


def test_failed_optimizer_step_leaves_the_newest_parameters():
    trainer = make_trainer("trainer", rounds=6)
    steps = 0

    def fail_in_round_3() -> None:
        nonlocal steps
        steps += 1
        if steps == 3 * 3 + 2:
            raise ZeroDivisionError

    trainer.register_op("post_optim", fail_in_round_3)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert hook_of(trainer).round == 3
    assert same_bits(snapshot(trainer.loss_module), trainer.collector.staged[-1])


def test_round_without_minibatches_counts():
    # The stage post_optim_complete_log isn't reached then.
    trainer = make_trainer("trainer", rounds=3)
    trainer.optim_steps_per_batch = 0
    before = snapshot(trainer.loss_module)
    trainer.train()
    assert hook_of(trainer).round == 3
    assert same_bits(snapshot(trainer.loss_module), before)


def test_batches_are_checked():
    trainer = make_trainer("trainer")
    trainer.collector.round = 2
    with pytest.raises(ValueError, match="expected a batch of policy version 0, found 2"):
        trainer.train()


def test_collector_without_lag_is_refused():
    trainer = make_trainer("trainer", delayed=False)
    del trainer.collector.lag
    with pytest.raises(TypeError, match="HTSCollector is needed"):
        DelayedGradient(trainer.loss_module).register(trainer)


def test_register_takes_the_collectors_lag():
    for given in (None, 2):
        trainer = make_trainer("trainer", lag=2, delayed=False)
        delayed = DelayedGradient(trainer.loss_module, lag=given)
        delayed.register(trainer, "another_name")
        assert delayed.lag == 2
        assert hook_of(trainer, "another_name") is delayed
    trainer = make_trainer("trainer", lag=2, delayed=False)
    with pytest.raises(ValueError, match="lag 1, the trainer's collector 2"):
        DelayedGradient(trainer.loss_module, lag=1).register(trainer)
    late = DelayedGradient(trainer.loss_module)
    with late:
        pass
    with pytest.raises(ValueError, match="before the first round"):
        late.register(trainer)
    assert trainer.optim_steps.__func__ is Trainer.optim_steps  # refused hooks leave nothing behind


def test_only_one_hook_fits_a_trainer():
    trainer = make_trainer("trainer")
    for name in ("delayed_gradient", "other"):
        with pytest.raises(RuntimeError, match="already"):
            DelayedGradient(trainer.loss_module).register(trainer, name)
    trainer.train()


def test_trainer_of_other_parameters_is_refused():
    trainer = make_trainer("trainer", delayed=False)
    with pytest.raises(ValueError, match="other parameters"):
        DelayedGradient(make_loss()[0]).register(trainer)


def test_trainer_that_does_not_train_batch_by_batch_is_refused():
    with warnings.catch_warnings():
        trainer = make_trainer("trainer", delayed=False, async_collection=True)
    with pytest.raises(ValueError, match="async_collection=False"):
        DelayedGradient(trainer.loss_module).register(trainer)


@pytest.mark.parametrize("kind", ["trainer", "stepper", "a2c", "ppo"])
def test_shards_learn_what_a_whole_batch_does(kind: str, shards: World) -> None:
    """Up to rounding; the minibatches of a replay buffer are the whole batch here."""
    results = []
    for world in (None, shards):
        trainer = make_trainer(kind, world=world, minibatch=FRAMES)
        trainer.train()
        results.append(snapshot(trainer.loss_module))
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(whole, cut, rtol=0, atol=1e-9)
    assert not same_bits(*results)


def test_advantages_are_normalised_over_all_shards(shards: World) -> None:
    """By the loss, and by GAE."""
    results = []
    for world in (None, shards):
        trainer = make_trainer("ppo", world=world, minibatch=FRAMES, delayed=False)
        trainer.loss_module.normalize_advantage = True
        hook_of(trainer, "value_estimator").value_estimator.average_gae = True
        DelayedGradient(trainer.loss_module).register(trainer)
        trainer.train()
        assert trainer.loss_module.normalize_advantage
        results.append(snapshot(trainer.loss_module))
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(whole, cut, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: setattr(t, "loss_module", lambda batch: batch), "must be a module, got funct"),
        (lambda t: setattr(t, "loss_module", nn.Sequential(nn.DataParallel(t.loss_module))), "'0'"),
        (lambda t: t.register_op("process_loss", lambda *_: None), "hooks of process_loss"),
        (
            lambda t: t.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
            "the optimizer has parameters that",
        ),
        (lambda t: setattr(t.collector, "split_trajs", True), "split_trajs=True"),
        (lambda t: setattr(t, "optimization_stepper", object()), "DefaultOptimizationStepper"),
        (
            lambda t: ReplayBufferTrainer(TensorDictReplayBuffer(batch_size=3)).register(t),
            "a replay buffer that keeps steps",
        ),
        (
            lambda t: setattr(t, "replay_buffer", ReplayBuffer(batch_size=3)),
            "must be a SamplerWithoutReplacement",
        ),
    ],
)
def test_what_several_learners_cannot_do_is_refused(
    change: Any, message: str, shards: World
) -> None:
    trainer = make_trainer("trainer", world=shards, delayed=False)
    change(trainer)
    with pytest.raises(ValueError, match=message):
        DelayedGradient(make_loss_of(trainer)).register(trainer)
    assert trainer.optim_steps.__func__ is Trainer.optim_steps  # and nothing is left behind
    assert not has_hook(trainer, "delayed_gradient")


def test_a_minibatch_that_cannot_be_cut_out_of_all_shards_is_refused(shards: World) -> None:
    trainer = make_trainer("ppo", world=shards, minibatch=8 - 1)
    with pytest.raises(ValueError, match="batch_size 7 must divide the 24 steps of all learners"):
        trainer.train()
