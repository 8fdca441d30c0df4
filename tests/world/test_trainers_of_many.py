"""TorchRL's trainers with several learners: one policy and one log for every number of them."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import generous_cartpole
from probe import logged
from ranks import run_ranks
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.checkpoint import Checkpoint
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import A2CTrainer, PPOTrainer

from torchrl_hts import DelayedGradient, HTSCollector, World, keep_servers
from torchrl_hts.testing import digest

# Two starts of ranks, on a machine that may be busy.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

NUM_ENVS, ALPHA, ROUNDS, SHARDS = 8, 8, 5, 4
FRAMES = NUM_ENVS * ALPHA


class Seen:
    """A logger that keeps what it is sent."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def log_scalar(self, name: str, value: Any, step: int) -> None:
        self.scalars.append((name, float(value), step))


def make_trainer(kind: str, world: World, file: Path | None) -> Trainer:
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[16]), ["observation"], ["logits"]),
        ["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[16]), ["observation"])
    loss: nn.Module = A2CLoss(actor, critic)
    if kind == "ppo":
        loss = ClipPPOLoss(actor, critic, normalize_advantage=True)
    collector = HTSCollector(
        [generous_cartpole] * NUM_ENVS,
        actor,
        frames_per_batch=FRAMES,
        total_frames=FRAMES * ROUNDS,
        seed=0,
        num_executors=1,
        world=world,
    )
    options: dict[str, Any] = {}
    if kind == "ppo":
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(FRAMES), sampler=SamplerWithoutReplacement(), batch_size=16
        )
        options = {"replay_buffer": buffer, "num_epochs": 2}
    if kind == "ppo" and file is not None:  # A2C by TorchRL's older way
        options["checkpoint"] = Checkpoint()
    trainer = {"a2c": A2CTrainer, "ppo": PPOTrainer}[kind](
        collector=collector,
        total_frames=FRAMES * ROUNDS,
        frame_skip=1,
        optim_steps_per_batch=1 if kind == "a2c" else None,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
        clip_norm=0.5,
        logger=Seen(),
        log_interval=0,
        progress_bar=False,
        save_trainer_file=file,
        save_trainer_interval=FRAMES * 100,
        **options,
    )
    DelayedGradient(loss).register(trainer)
    return trainer


def result(trainer: Trainer) -> dict[str, Any]:
    return {
        "parameters": digest(trainer.loss_module.parameters()),
        "log": {key: [float(item) for item in items] for key, items in logged(trainer).items()},
        "frames": trainer.collected_frames,
        "sent": trainer.logger.scalars if trainer.logger else None,
    }


def stop(trainer: Trainer) -> None:
    if trainer.collected_frames >= FRAMES * 3:
        trainer.request_stop("the test ends it")


def trained(kind: str, world: World, saves: Path | None = None, loads: Path | None = None) -> Any:
    """A run, or its beginning until one learner stops it and it is saved, or the rest of it."""
    trainer = make_trainer(kind, world, saves)
    if loads is not None:
        trainer.load_from_file(loads, weights_only=False)
    elif saves is not None and world.rank == world.size - 1:
        trainer.register_op("post_steps_log", lambda batch: stop(trainer))
    trainer.train()
    return result(trainer)


def train_all(shards: int | None, directory: Path) -> dict[str, Any]:
    """As few runs as show all: starting one takes longest."""
    warnings.simplefilter("ignore")
    of_one, of_two = directory / "ppo", directory / "a2c"
    with keep_servers(), World(shards=shards, timeout_s=200) as world:
        if shards is None:
            return {"ppo": trained("ppo", world), "ppo again": trained("ppo", world)}
        if world.size == 1:
            found = {kind: trained(kind, world) for kind in ("a2c", "ppo")}
            return {**found, "ppo, saved": trained("ppo", world, saves=of_one)}
        if world.size == 2:
            found = {"ppo": trained("ppo", world)}
            found["a2c, saved"] = trained("a2c", world, saves=of_two)
            return {**found, "a2c, the rest": trained("a2c", world, loads=of_two)}
        return {
            "a2c": trained("a2c", world),
            "ppo, the rest": trained("ppo", world, loads=of_one),
        }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, Any]:
    """What one learner makes of it; leaves a checkpoint of three rounds of PPO."""
    (outcome,) = run_ranks(train_all, 1, SHARDS, directory, timeout_s=400)
    assert outcome.error == ""
    return outcome.result  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [2, 4])
def test_i7_the_number_of_learners_makes_no_difference(
    size: int, alone: dict[str, Any], directory: Path
) -> None:
    outcomes = run_ranks(train_all, size, SHARDS, directory, timeout_s=400)
    assert [outcome.error for outcome in outcomes] == [""] * size
    for rank, outcome in enumerate(outcomes):
        for name, found in outcome.result.items():
            expected = alone[name[:3]]
            if name.endswith("saved"):  # one learner stopped all
                assert found["frames"] == FRAMES * 3
                continue
            assert found["parameters"] == expected["parameters"], name
            assert found["frames"] == expected["frames"] == FRAMES * ROUNDS
            rounds = 2 if name.endswith("rest") else ROUNDS
            expected_log = {key: items[-rounds:] for key, items in expected["log"].items()}
            assert found["log"] == expected_log, name
            if rounds == ROUNDS:
                assert found["sent"] == (expected["sent"] if rank == 0 else None)


def test_what_is_logged_is_of_all_learners(alone: dict[str, Any]) -> None:
    for kind, steps in ("a2c", 1), ("ppo", 8):
        log = alone[kind]["log"]
        assert log["optim_steps"] == [steps * (1 + round_) for round_ in range(ROUNDS)]
        assert 0 < log["grad_norm_0"][0] < math.inf
        assert len(alone[kind]["sent"]) > ROUNDS
    assert alone["a2c"]["parameters"] != alone["ppo"]["parameters"]


def test_learners_without_shards_agree_from_run_to_run(tmp_path: Path) -> None:
    outcomes = run_ranks(train_all, 2, None, tmp_path, timeout_s=400)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    found = [run for outcome in outcomes for run in outcome.result.values()]
    assert len({run["parameters"] for run in found}) == 1
    assert all(run["log"] == found[0]["log"] for run in found)
    assert found[0]["frames"] == FRAMES * ROUNDS
