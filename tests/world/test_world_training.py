"""One policy for every number of learners: CartPole, A2C and PPO, shards, W = 1, 2, 4."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import pytest
import torch
from environments import generous_cartpole
from policies import categorical
from ranks import results, run_ranks
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_hts import (
    DelayedGradient,
    EpisodeReturns,
    HTSCollector,
    World,
    WorldError,
    keep_servers,
)
from torchrl_hts.testing import digest

NUM_ENVS, ALPHA, UPDATES, SHARDS = 8, 16, 5, 4
MOST_KL = 1e-3
EPISODES = [("next", "reward"), ("next", "done"), ("collector", "traj_ids")]
RESULTS = ["parameters", "metrics", "episodes", "trajectories", "frames", "versions"]


def sum_of(losses: TensorDictBase) -> Tensor:
    return sum(value for key, value in losses.items() if key.startswith("loss_"))  # type: ignore[no-any-return]


def networks(algorithm: str) -> tuple[nn.Module, ValueOperator, nn.Module]:
    """The policy, the critic, and the loss of both."""
    cells = [32, 32]
    actor = ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=cells), ["observation"], ["logits"]),
        ["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(4, 1, num_cells=cells), ["observation"])
    if algorithm == "ppo":
        return actor, critic, ClipPPOLoss(actor, critic, normalize_advantage=False)
    return actor, critic, A2CLoss(actor, critic)


def step(
    world: World, loss_module: nn.Module, optimizer: torch.optim.Optimizer, parts: Any
) -> tuple[bytes, Tensor]:
    """A step of the optimizer; returns the bits of the loss, and the KL divergence, if any."""
    losses, kls = [], []
    for part in world.gradients(loss_module, parts):
        found = loss_module(part)
        losses.append(sum_of(found))
        losses[-1].backward()
        kls.append(found.get("kl_approx", torch.zeros(())))
    loss, kl = world.mean(losses).numpy().tobytes(), world.mean(kls)
    nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss, kl


def learn(
    world: World,
    loss_module: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[TensorDictBase],
    seed: int,
    most_kl: float,
) -> list[bytes]:
    """All steps of the optimizer with a batch; returns the bits of their losses."""
    if isinstance(loss_module, A2CLoss):
        return [step(world, loss_module, optimizer, [part.reshape(-1) for part in parts])[0]]
    found = []
    for epoch in range(2):
        for minibatch in world.minibatches(parts, 4, seed=seed, epoch=epoch):
            world.normalize(minibatch)
            loss, kl = step(world, loss_module, optimizer, minibatch)
            found.append(loss)
            if kl > most_kl:
                return found
    return found


def train(
    algorithm: str,
    shards: int | None,
    executors: int,
    pause_s: float,
    seed: int = 0,
    entries: Sequence[Any] = (generous_cartpole,) * NUM_ENVS,
    lag: int = 1,
    most_kl: float = math.inf,
) -> dict[str, Any]:
    """What a user's loop does, and what came of it."""
    torch.manual_seed(seed)
    actor, critic, loss_module = networks(algorithm)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    metrics: list[list[bytes]] = []
    versions: list[int] = []
    episodes, everywhere = EpisodeReturns(), []
    with World(shards=shards, timeout_s=60) as world:
        collector = HTSCollector(
            list(entries),
            actor,
            frames_per_batch=NUM_ENVS * ALPHA,
            total_frames=NUM_ENVS * ALPHA * UPDATES,
            seed=seed,
            num_executors=executors,
            lag=lag,
            world=world,
        )
        delayed = DelayedGradient(loss_module, lag=collector.lag)
        for batch in collector:
            versions.append(int(batch["policy_version"][0, 0]))
            if world.rank == world.size - 1:
                time.sleep(pause_s)  # must make no difference
            with delayed(batch):
                parts = world.parts(batch)
                for part in parts:
                    with torch.no_grad():
                        advantage(part)
                metrics.append(learn(world, loss_module, optimizer, parts, seed, most_kl))
            seen = batch.select(*EPISODES)
            episodes.update(torch.cat(world.gather(seen)))
            everywhere.append(batch["collector", "traj_ids"])
        statistics = collector.statistics()
        trajectories = torch.cat(world.gather(torch.cat(everywhere, 1)))
    return {
        "parameters": digest(loss_module.parameters()),
        "metrics": metrics,
        "episodes": (episodes.count, episodes.mean, episodes.mean_length),
        "trajectories": trajectories.tolist(),
        "frames": statistics.frames,
        "versions": versions,
        "rows": len(batch),
        "largest": statistics.invariant_sizes.full_size,
    }


def train_all(pauses: bool) -> dict[str, dict[str, Any]]:
    """Both algorithms in one process: starting one takes longest."""
    with keep_servers():
        executors = 2 if pauses else 1
        pause_s = 0.05 if pauses else 0.0
        return {
            algorithm: train(algorithm, SHARDS, executors, pause_s) for algorithm in ("a2c", "ppo")
        }


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """What one learner makes of it."""
    (outcome,) = run_ranks(train_all, 1, False)
    assert outcome.error == ""
    return outcome.result  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [2, 4])
def test_the_number_of_learners_makes_no_difference(size: int, alone: dict[str, Any]) -> None:
    """Nor do a rank that pauses and another number of executors."""
    for outcome in run_ranks(train_all, size, True, timeout_s=200):
        assert outcome.error == ""
        for algorithm, expected in alone.items():
            found = outcome.result[algorithm]
            assert found["rows"] * size == expected["rows"]
            for name in RESULTS:
                assert found[name] == expected[name], (algorithm, name)
            assert found["largest"] <= NUM_ENVS // size
    assert alone["a2c"]["largest"] > NUM_ENVS // SHARDS  # batches of several shards' environments
    assert alone["a2c"]["episodes"][0] > 0
    assert len({result["parameters"] for result in alone.values()}) == 2


def train_lags() -> dict[int, dict[str, Any]]:
    """PPO whose epochs end early, at other lags than one."""
    with keep_servers():
        return {lag: train("ppo", SHARDS, 1, 0.0, lag=lag, most_kl=MOST_KL) for lag in (0, 2)}


def test_other_lags_and_a_stop_by_kl_make_no_difference() -> None:
    (alone,), learners = (results(run_ranks(train_lags, size, timeout_s=200)) for size in (1, 2))
    for found in learners:
        for lag, expected in alone.items():
            for name in RESULTS:
                assert found[lag][name] == expected[name], (lag, name)
    for result in alone.values():
        steps = {len(losses) for losses in result["metrics"]}
        assert min(steps) < 8, "no round was stopped"
        assert len(steps) > 1
    assert alone[0]["parameters"] != alone[2]["parameters"]


def train_batches() -> list[dict[str, Any]]:
    """With environments one by one, and with batches of two."""
    single = functools.partial(gym.make, "CartPole-v1")
    batch = functools.partial(gym.make_vec, "CartPole-v1", 2, vectorization_mode="sync")
    with keep_servers():
        return [
            train("a2c", SHARDS, 1, 0.0, entries=entries)
            for entries in ([single] * NUM_ENVS, [batch] * (NUM_ENVS // 2))
        ]


def test_learners_share_out_batches_with_the_bits_of_single_environments() -> None:
    found = [
        result
        for size in (1, 2)
        for outcome in run_ranks(train_batches, size, timeout_s=200)
        for result in outcome.result
    ]
    assert len(found) == 6
    for name in RESULTS:
        assert len({str(result[name]) for result in found}) == 1, name
    assert {result["rows"] for result in found} == {NUM_ENVS, NUM_ENVS // 2}


def test_batches_of_several_sizes_are_not_shared_out() -> None:
    single = functools.partial(gym.make, "CartPole-v1")
    batch = functools.partial(gym.make_vec, "CartPole-v1", 2, vectorization_mode="sync")
    given: dict[str, Any] = {"frames_per_batch": 6, "total_frames": 6, "num_executors": 1}
    with World(shards=2) as world, pytest.raises(ValueError, match="make 1, 2 environments"):
        HTSCollector([single, batch], categorical(num_actions=2), world=world, **given)
    with (
        World() as world,
        HTSCollector([single, batch], categorical(num_actions=2), world=world, **given) as data,
    ):
        assert [batch.shape for batch in data] == [(3, 2)]


def train_one(world: World | None) -> str:
    """A2C by one learner, in a loop that knows of no others, or of a world of one."""
    torch.manual_seed(0)
    actor, critic, loss_module = networks("a2c")
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    with HTSCollector(
        [generous_cartpole] * NUM_ENVS,
        actor,
        frames_per_batch=NUM_ENVS * ALPHA,
        total_frames=NUM_ENVS * ALPHA * UPDATES,
        seed=0,
        num_executors=1,
        world=world,
    ) as collector:
        delayed = DelayedGradient(loss_module, lag=collector.lag)
        for batch in collector:
            with delayed(batch):
                for part in [batch] if world is None else world.gradients(loss_module, batch):
                    with torch.no_grad():
                        advantage(part)
                    sum_of(loss_module(part.reshape(-1))).backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return digest(loss_module.parameters())


def test_a_world_of_one_without_shards_gives_the_bits_of_none(warm_servers: None) -> None:
    torch.manual_seed(0)
    before = digest(networks("a2c")[2].parameters())
    with World() as world:
        assert before != train_one(world) == train_one(None)


def collector_of(world: World, policy: nn.Module, **options: Any) -> HTSCollector:
    options = {"frames_per_batch": 8, "total_frames": 24, "seed": 0, "num_executors": 1} | options
    return HTSCollector(
        [functools.partial(gym.make, "CartPole-v1")] * 4, policy, world=world, **options
    )


def refused(world: World, policy: nn.Module, **options: Any) -> str:
    with pytest.raises(WorldError) as raised:
        collector_of(world, policy, **options)
    return str(raised.value)


def without_shards() -> dict[str, Any]:
    """Two learners that add by all-reduce, and what is refused."""
    with keep_servers():
        found: dict[str, Any] = {"runs": [train("a2c", None, 1, 0.0) for _ in range(2)]}
        with World(timeout_s=60) as world:
            policy = categorical(num_actions=2)
            with collector_of(world, policy, seed=None) as collector:
                found["seed"] = collector.seed
            odd = world.rank == 1
            found["frames"] = refused(world, policy, total_frames=16 if odd else 24)
            found["policy"] = refused(world, categorical(num_actions=2, seed=int(odd)))
            with collector_of(world, policy) as collector, pytest.raises(WorldError) as raised:
                train_alone(collector, world.rank)
            found["update"] = str(raised.value)
    return found


def train_alone(collector: HTSCollector, rank: int) -> None:
    """A loop that forgets the other learners."""
    for _ in collector:
        with torch.no_grad():
            for parameter in collector.policy.parameters():
                parameter += rank


def test_learners_without_shards_agree_with_each_other_and_from_run_to_run() -> None:
    outcomes = run_ranks(without_shards, 2, timeout_s=200)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    first, second = (outcome.result for outcome in outcomes)
    for name in RESULTS:
        assert len({str(run[name]) for found in (first, second) for run in found["runs"]}) == 1, (
            name
        )
    assert first["seed"] == second["seed"]
    for found in (first, second):
        assert found["frames"].startswith("rank 1 has total_frames 16, the others 24")
        assert found["policy"].startswith("rank 1 has policy ")
        assert "in a loop over World.gradients" in found["update"]
