"""Hydra configurations: composed as TorchRL's own, and in TorchRL's trainer recipe as it is."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import policies
import pytest
import torch
import torchrl
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig
from probe import batched_env_target, hook_of
from processes import comes_from_torch_free_server
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import PPOTrainer
from torchrl.trainers.algorithms.configs import PPOTrainerConfig  # noqa: F401  # registers them all
from torchrl.trainers.algorithms.configs.envs import BatchedEnvConfig

from torchrl_hts import DelayedGradient, HTSCollector, UndelayedUpdateWarning
from torchrl_hts.configs import (
    AtariEnvConfig,
    DelayedGradientConfig,
    GymnasiumEnvConfig,
    HTSCollectorConfig,
)
from torchrl_hts.envs import make_atari
from torchrl_hts.testing import digest

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:.*(experimental/prototype|hook stage will be replaced)"),
]

ROOT = Path(__file__).parents[2]
NUM_ENVS, ALPHA, ROUNDS = 4, 8, 5
FRAMES = NUM_ENVS * ALPHA

# In the manner of TorchRL's recipes, which make the policy twice; here even with unlike parameters.
EXPERIMENT = {
    "defaults": [
        {"env@env": "hts_gymnasium"},
        {"collector@collector": "sync"},
        {"replay_buffer@replay_buffer": "base"},
        {"storage@replay_buffer.storage": "lazy_tensor"},
        {"sampler@replay_buffer.sampler": "without_replacement"},
        {"writer@replay_buffer.writer": "round_robin"},
        {"optimizer@optimizer": "adam"},
        {"loss@loss": "ppo"},
        {"trainer@trainer": "ppo"},
        "_self_",
    ],
    "env": {"id": "CartPole-v1"},
    "policy": {"_target_": "policies.categorical", "num_inputs": 4, "num_actions": 2},
    "collector": {
        "create_env_fn": "${env}",
        "policy": {"_target_": "policies.categorical", "num_actions": 2, "seed": 1},
        "frames_per_batch": FRAMES,
        "total_frames": FRAMES * ROUNDS,
        "_partial_": True,
    },
    "replay_buffer": {"storage": {"max_size": FRAMES}, "batch_size": FRAMES // 4},
    "loss": {
        "actor_network": "${policy}",
        "critic_network": {"_target_": "test_configs.critic"},
    },
    "optimizer": {"lr": 0.01, "eps": 1e-8},
    "trainer": {
        "collector": "${collector}",
        "replay_buffer": "${replay_buffer}",
        "loss_module": "${loss}",
        "optimizer": "${optimizer}",
        "logger": None,
        "save_trainer_file": None,
        "total_frames": FRAMES * ROUNDS,
        "optim_steps_per_batch": None,
        "num_epochs": 2,
        "clip_norm": 0.5,
        "progress_bar": False,
        "seed": 0,
    },
}


def critic() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation"])


def experiment(*overrides: str) -> DictConfig:
    ConfigStore.instance().store(name="experiment", node=EXPERIMENT)
    with initialize(version_base="1.3", config_path=None):
        return compose("experiment", overrides=["collector=hts", *overrides])


# So that nothing is timed to find out how many there should be.
WORKERS = {"num_executors": 1, "num_actors": 1}


def configured_trainer(*overrides: str) -> Trainer:
    workers = [f"collector.{name}={count}" for name, count in WORKERS.items()]
    return instantiate(experiment(f"collector.num_envs={NUM_ENVS}", *workers, *overrides).trainer)


def trainer_by_hand(lag: int) -> Trainer:
    policy, value = policies.categorical(4, 2), critic()
    loss_module = ClipPPOLoss(policy, value)
    collector = HTSCollector(
        [partial(gym.make, "CartPole-v1")] * NUM_ENVS,
        policy,
        frames_per_batch=FRAMES,
        total_frames=FRAMES * ROUNDS,
        lag=lag,
        **WORKERS,
    )
    trainer = PPOTrainer(
        collector=collector,
        total_frames=collector.total_frames,
        frame_skip=1,
        optim_steps_per_batch=None,
        loss_module=loss_module,
        optimizer=torch.optim.Adam(loss_module.parameters(), lr=0.01),
        clip_norm=0.5,
        progress_bar=False,
        seed=0,
        num_epochs=2,
        replay_buffer=ReplayBuffer(
            storage=LazyTensorStorage(FRAMES),
            sampler=SamplerWithoutReplacement(),
            batch_size=FRAMES // 4,
        ),
    )
    DelayedGradient(loss_module).register(trainer)
    return trainer


def trained(trainer: Trainer) -> str:
    with trainer.collector, warnings.catch_warnings():
        warnings.simplefilter("error", UndelayedUpdateWarning)
        trainer.train()
    assert hook_of(trainer).round == ROUNDS
    return digest(trainer.loss_module.parameters())


# The configurations themselves.


@pytest.mark.parametrize(
    ("config", "function", "apart"),
    [
        # A world is no setting: TorchRL's trainers, which are what configurations make, have none.
        (HTSCollectorConfig, HTSCollector, {"num_envs", "num_workers", "stock_arguments", "world"}),
        (DelayedGradientConfig, DelayedGradient, {"loss_module"}),
        (GymnasiumEnvConfig, gym.make, {"kwargs"}),
        (AtariEnvConfig, make_atari, set()),
    ],
)
def test_fields_are_the_arguments(
    config: type, function: Callable[..., Any], apart: set[str]
) -> None:
    own = {f.name: f.default for f in fields(config) if not f.name.startswith("_")}
    theirs = {
        name: MISSING if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
    }
    if "exploration_type" in own:
        theirs["exploration_type"] = theirs["exploration_type"].name
    assert {k: own[k] for k in own.keys() - apart} == {k: theirs[k] for k in theirs.keys() - apart}


def test_what_an_import_loads() -> None:
    """Hydra imports the configurations in every application, and the package needs no Hydra."""
    code = (
        "import sys, torchrl_hts\n"
        "print('hydra' in sys.modules)\n"
        "import torchrl_hts.configs\n"
        "print([m for m in ('torch', 'gymnasium', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split("\n")[:2] == ["False", "[]"]


def test_torchrls_name_of_its_batched_environment() -> None:
    assert BatchedEnvConfig._target_ == batched_env_target()


# In a trainer.


@pytest.mark.parametrize("lag", [0, 1])
def test_the_configured_trainer_gives_the_bits_of_one_made_by_hand(lag: int) -> None:
    """The first rounds too are taken by the policy that learns, though Hydra makes two of them."""
    hook = ("+hook=delayed_gradient", "trainer.hooks=[${hook}]", f"collector.lag={lag}")
    trainer = configured_trainer(*hook)
    # Gymnasium's environments go the fast path.
    assert comes_from_torch_free_server(trainer.collector.worker_pids()["executor 0"])
    assert trained(trainer) == trained(trainer_by_hand(lag))


def test_a_trainer_without_the_hook() -> None:
    trainer = configured_trainer()
    before = digest(trainer.loss_module.parameters())
    versions = []
    trainer.register_op(
        "batch_process", lambda batch: versions.extend(batch["policy_version"].unique().tolist())
    )
    with trainer.collector, pytest.warns(UndelayedUpdateWarning):
        trainer.train()
    assert versions == [*range(ROUNDS)]
    assert digest(trainer.loss_module.parameters()) != before


def test_checkpoints_hold_the_hooks_state() -> None:
    overrides = ("+hook=delayed_gradient", "trainer.hooks=[${hook}]")
    trainer = configured_trainer(*overrides)
    trained(trainer)
    other = configured_trainer(*overrides)
    with other.collector:
        hook_of(other).load_state_dict(trainer.state_dict()["delayed_gradient"])
        assert hook_of(other).round == ROUNDS


def test_torchrls_recipe_as_it_is(tmp_path: Path) -> None:
    """Nothing in its script speaks of this package: Hydra finds the configurations by itself."""
    recipe = Path(torchrl.__file__).parents[1] / "sota-implementations/ppo_trainer/train.py"
    if not recipe.exists():
        pytest.skip("this torchrl comes without its recipes")
    shutil.copy(recipe, tmp_path / "train.py")
    (tmp_path / "config").mkdir()
    shutil.copy(
        Path(__file__).with_name("torchrl_ppo_trainer.yaml"), tmp_path / "config/config.yaml"
    )
    arguments = [
        *("collector=hts", "+hook=delayed_gradient", "trainer.hooks=[${hook}]"),
        *("collector.frames_per_batch=64", "replay_buffer.batch_size=32"),
        *("collector.num_executors=1", "collector.num_actors=1"),
        *("collector.total_frames=192", "trainer.total_frames=192", "trainer.progress_bar=false"),
        # Its keys for a logger don't fit the one that it chooses.
        *("logger=wandb", "trainer.logger=null"),
    ]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "train.py", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert output.count("reward:") == 3, output


# Keys of the command line.


def test_keys_of_other_collectors() -> None:
    """They compose, and are refused with a reason; the command line takes them out."""
    overrides = ("collector._partial_=false", "collector.reset_at_each_iter=true")
    with pytest.raises(InstantiationException, match="not take reset_at_each_iter: episodes go on"):
        instantiate(experiment(*overrides).collector)
    config = experiment(*overrides, "~collector.reset_at_each_iter")
    with instantiate(config.collector) as collector:
        assert collector.num_envs == 1


def test_further_keys_of_a_gymnasium_environment_are_its_own() -> None:
    config = experiment("env.sutton_barto_reward=true")
    env = instantiate(config.env)
    env.reset(seed=0)
    assert env.step(0)[1] == 0, "by default, a step is rewarded with 1"


def test_an_atari_game() -> None:
    pytest.importorskip("ale_py")
    with initialize(version_base="1.3", config_path=None):
        config = compose(overrides=["+env=hts_atari", "env.frame_stack=2"])
    assert instantiate(config.env).observation_space.shape == (2, 84, 84)


# The hook.


@pytest.mark.parametrize(
    ("hook", "overrides", "message"),
    [
        ({"gradient_at": "oldest"}, (), "gradient_at must be one of"),
        ({"lag": 3}, (), "DelayedGradient has lag 3, the trainer's collector 1"),
        ({}, ("+collector.policy.num_inputs=4", "policy.num_actions=3"), "isn't the loss module's"),
        ({}, ("collector.lag=1",), None),
    ],
)
def test_a_hook_and_a_trainer_that_fit_or_do_not(
    hook: dict[str, Any], overrides: tuple[str, ...], message: str | None
) -> None:
    trainer = configured_trainer(*overrides)
    with trainer.collector:
        delayed = instantiate(DelayedGradientConfig(**hook))
        if message is None:
            delayed.register(trainer)
            actor = dict(trainer.loss_module.actor_network.named_parameters())
            ours = dict(trainer.collector.policy.named_parameters())
            assert all(ours[name] is parameter for name, parameter in actor.items())
        else:
            with pytest.raises(ValueError, match=message):
                delayed.register(trainer)


def test_a_loss_without_an_actor() -> None:
    trainer = configured_trainer()
    with trainer.collector:
        trainer.loss_module = nn.Linear(1, 1)
        with pytest.raises(TypeError, match="a Linear, has no actor_network"):
            instantiate(DelayedGradientConfig()).register(trainer)


def test_the_hook_needs_a_collector_with_a_lag() -> None:
    trainer = configured_trainer()
    with trainer.collector:
        del trainer.collector.lag
        with pytest.raises(TypeError, match="HTSCollector is needed"):
            instantiate(DelayedGradientConfig()).register(trainer)


def test_the_hook_has_no_state_before_it_is_registered() -> None:
    hook = instantiate(DelayedGradientConfig())
    for use in (hook.state_dict, lambda: hook.load_state_dict({})):
        with pytest.raises(RuntimeError, match="before it is registered"):
            use()
