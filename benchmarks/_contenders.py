"""The workloads, and who competes on them: HTSCollector and TorchRL's own collectors."""

# ruff: noqa: E402  the recipes are put on the path before they are imported

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "recipes"), str(HERE)]

import torch
from _environments import OBSERVATION_SIZE, CostlessEnv, SleepEnv
from support.pixels import NatureCNN, encode
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from torchrl.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, HTSCollector
from torchrl_hts.envs import make_atari

NUM_ENVS = 16
SLEEP_MEAN_S = 0.01
ALPHA = {"sleep": 20, "costless": 20, "atari5": 5, "atari20": 20}
WORKLOADS = [*ALPHA, "startup"]
CONTENDERS = [
    "hts",
    "hts-lag0",
    "hts-lag2",
    "serial",
    "parallel",
    "multi-sync",
    "multi-async",
    "async-batched",
]
DEFAULT_CONTENDERS = [name for name in CONTENDERS if name not in ("hts-lag0", "hts-lag2")]
STOCK = "-stock"  # suffix of a contender whose update is TorchRL's own
CONTENDERS += [name + STOCK for name in CONTENDERS if name != "async-batched"]
CORES = len(os.sched_getaffinity(0))


def make_factories(workload: str, env_id: str) -> list[Callable[[], Any]]:
    """One factory per environment, of plain gymnasium environments."""
    if workload == "sleep":
        return [partial(SleepEnv, index, SLEEP_MEAN_S) for index in range(NUM_ENVS)]
    return [CostlessEnv if workload == "costless" else partial(make_atari, env_id)] * NUM_ENVS


def wrap(factory: Callable[[], Any]) -> EnvBase:
    """The same environment for TorchRL's collectors."""
    return GymWrapper(factory(), categorical_action_encoding=True)


def serial(factories: list[Callable[[], Any]]) -> EnvBase:
    """Several of them in one process."""
    return SerialEnv(len(factories), [partial(wrap, factory) for factory in factories])


def make_actor(logits: TensorDictModuleBase) -> ProbabilisticActor:
    """Samples an action from what a module gives as its logits."""
    return ProbabilisticActor(
        logits,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


class Model:
    """Trunk, heads and policy; the policy is all that collectors see."""

    def __init__(self, workload: str, env_id: str) -> None:
        torch.manual_seed(0)
        if workload.startswith("atari"):
            trunk, width, num_actions = (
                NatureCNN((4, 84, 84)),
                512,
                int(make_atari(env_id).action_space.n),
            )
        else:
            width, num_actions = 64, 4
            trunk = nn.Sequential(
                nn.Linear(OBSERVATION_SIZE, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
            )
        self.trunk = TensorDictModule(trunk, in_keys=["observation"], out_keys=["hidden"])
        self.logits = TensorDictModule(nn.Linear(width, num_actions), ["hidden"], ["logits"])
        self.actor_head = make_actor(self.logits)
        self.critic_head = ValueOperator(nn.Linear(width, 1), in_keys=["hidden"])
        self.policy = TensorDictSequential(self.trunk, self.actor_head).select_out_keys(
            "action", "action_log_prob"
        )


def make_policy(workload: str, env_id: str) -> TensorDictSequential:
    """The policy alone, for collectors that make it in another process."""
    return Model(workload, env_id).policy


def make_collector(workload: str, contender: str, env_id: str, model: Model) -> Any:
    """A collector that yields batches of ``16 * alpha`` steps without end."""
    factories = make_factories(workload, env_id)
    sizes = {"frames_per_batch": NUM_ENVS * ALPHA[workload], "total_frames": -1}
    if contender.startswith("hts"):
        return HTSCollector(
            factories,
            model.policy,
            **sizes,
            num_executors=NUM_ENVS if workload == "sleep" else None,
            lag={"hts": 1, "hts-lag0": 0, "hts-lag2": 2}[contender],
            seed=0,
        )
    if contender == "serial":
        return Collector(serial(factories), model.policy, **sizes)
    if contender == "parallel":
        env = ParallelEnv(NUM_ENVS, [partial(wrap, factory) for factory in factories])
        return Collector(env, model.policy, **sizes)
    if contender == "async-batched":
        return AsyncBatchedCollector(
            [partial(wrap, factory) for factory in factories],
            policy_factory=partial(make_policy, workload, env_id),
            env_backend="multiprocessing",
            transport="auto",
            **sizes,
        )
    num_workers = NUM_ENVS if workload == "sleep" else min(CORES, NUM_ENVS)
    shares = [partial(serial, factories[worker::num_workers]) for worker in range(num_workers)]
    collector_class = {"multi-sync": MultiSyncCollector, "multi-async": MultiAsyncCollector}
    extra = {"cat_results": 0} if contender == "multi-sync" else {}
    return collector_class[contender](shares, model.policy, **sizes, **extra)


def make_update(
    model: Model, lag: int | None, *, stock: bool = False
) -> Callable[[TensorDictBase], None]:
    """One A2C update with a batch; delayed by ``lag`` rounds unless that is None.

    ``stock`` leaves it to GAE and A2CLoss to run the shared trunk, as often as they do.
    """
    actor, critic = model.actor_head, model.critic_head
    if stock:
        actor = make_actor(TensorDictSequential(model.trunk, model.logits))
        critic = TensorDictSequential(model.trunk, critic)
    advantage = GAE(gamma=0.99, lmbda=1.0, value_network=critic)
    loss_module = A2CLoss(
        actor,
        critic,
        entropy_coeff=0.01,
        critic_coeff=0.5,
        loss_critic_type="l2",
    )
    trained = nn.ModuleList([model.trunk, loss_module])
    optimizer = torch.optim.RMSprop(trained.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)

    def update(batch: TensorDictBase) -> None:
        if not stock:
            encode(model.trunk, batch)
        with torch.no_grad():
            advantage(batch)
        losses = loss_module(batch.reshape(-1))
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    if lag is None:
        return update
    delayed = DelayedGradient(trained, lag=lag)

    def delayed_update(batch: TensorDictBase) -> None:
        with delayed(batch):
            update(batch)

    return delayed_update
