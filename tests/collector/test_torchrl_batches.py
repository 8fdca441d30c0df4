"""Batches of TorchRL's environments, and groups of agents, each a unit of the schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from collectors import start
from policies import categorical
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import RewardSum, TransformedEnv
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.modules import MultiAgentMLP, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss, ValueEstimators
from torchrl_environments import Clocks

pytestmark = [pytest.mark.usefixtures("collectors_end"), pytest.mark.timeout(120)]

LENGTHS = (2, 5, 3, 4, 6, 7)
K, ALPHA = len(LENGTHS), 4
ALONE = [partial(Clocks, length, alone=True) for length in LENGTHS]


def collect(envs: list[Any], rounds: int = 4, **kwargs: Any) -> TensorDictBase:
    """All that is collected, ``[K, rounds * alpha]``."""
    kwargs = {"policy": categorical(3, 3)} | kwargs
    with start(
        envs, frames_per_batch=K * ALPHA, total_frames=K * ALPHA * rounds, **kwargs
    ) as collector:
        return torch.cat(list(collector), 1)


def test_the_data_are_those_of_single_environments() -> None:
    """I7: whoever steps them, in batches of whatever size."""
    expected = collect(ALONE)
    assert (collect([partial(Clocks, *LENGTHS)]) == expected).all()
    mixed = [partial(Clocks, 2, 5, 3), *ALONE[3:5], partial(Clocks, 7)]
    assert (collect(mixed, num_executors=2, num_actors=2) == expected).all()
    assert len(expected["collector", "traj_ids"].unique()) > 3 * K


def test_i7_a_batch_goes_on_from_a_saved_state() -> None:
    envs = [partial(Clocks, 2, 5, 3), partial(Clocks, 4, 6, 7)]
    kwargs: dict[str, Any] = {"frames_per_batch": K * ALPHA, "total_frames": 6 * K * ALPHA}
    with start(envs, categorical(3, 3), **kwargs) as collector:
        batches = iter(collector)
        next(batches)
        state = collector.state_dict()
        expected = torch.cat(list(batches), 1)
    with start(envs, categorical(3, 3), num_executors=2, **kwargs) as collector:
        collector.load_state_dict(state)
        assert (torch.cat(list(collector), 1) == expected).all()
    assert len(expected["collector", "traj_ids"].unique()) > 2 * K


def learn(collector: Any, policy: Any, critic: Any, env: Any) -> list[TensorDictBase]:
    """The loop of TorchRL's tutorial on multi-agent PPO, with one optimizer step for a batch."""
    loss_module = ClipPPOLoss(policy, critic, clip_epsilon=0.2, normalize_advantage=False)
    loss_module.set_keys(
        reward=env.reward_key,
        action=env.action_key,
        value=("agents", "state_value"),
        done=("agents", "done"),
        terminated=("agents", "terminated"),
    )
    loss_module.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.9)
    optimizer = torch.optim.Adam(loss_module.parameters(), 1e-2)
    batches = []
    for batch in collector:
        batches.append(batch.clone())
        for name in ("done", "terminated"):
            flags = batch["next", name].unsqueeze(-1)
            shape = batch.get_item_shape(("next", env.reward_key))
            batch["next", "agents", name] = flags.expand(shape)
        with torch.no_grad():
            loss_module.value_estimator(
                batch,
                params=loss_module.critic_network_params,
                target_params=loss_module.target_critic_network_params,
            )
        losses = loss_module(batch.reshape(-1))
        sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
        optimizer.step()
        optimizer.zero_grad()
        collector.update_policy_weights_()
    return batches


def make_group(*lengths: int) -> Any:
    env = Clocks(*lengths, num_agents=2)
    return TransformedEnv(
        env, RewardSum(in_keys=[env.reward_key], out_keys=[("agents", "episode_reward")])
    )


def agents_of(env: Any, sizes: dict[str, int]) -> tuple[Any, Any]:
    """Policy and critic of the tutorial, for indices as actions."""
    torch.manual_seed(0)
    common: dict[str, Any] = {"n_agents": 2, "centralized": True, "share_params": True,
                              "depth": 1, "num_cells": 8}  # fmt: skip
    actor = MultiAgentMLP(**{**common, "centralized": False}, **sizes)
    critic = MultiAgentMLP(**common, **{**sizes, "n_agent_outputs": 1})
    policy = ProbabilisticActor(
        TensorDictModule(actor, [("agents", "observation")], [("agents", "logits")]),
        in_keys=[("agents", "logits")],
        out_keys=[env.action_key],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    value = TensorDictModule(critic, [("agents", "observation")], [("agents", "state_value")])
    return policy, value


def layout_of(batch: TensorDictBase) -> dict[Any, Any]:
    """Shape and data type by key, and the batch size of what holds others."""
    found: dict[Any, Any] = {}
    for key, value in batch.items(True):
        if "policy_version" not in key:
            found[key] = (value.shape, getattr(value, "dtype", None))
    return found


def test_a_group_of_agents_learns_in_the_loop_of_torchrls_tutorial() -> None:
    """With nothing but the collector's line changed, and batches that look the same."""
    env = make_group(*LENGTHS)
    sizes = {"n_agent_inputs": 3, "n_agent_outputs": 3}
    frames: dict[str, Any] = {"frames_per_batch": K * ALPHA, "total_frames": 3 * K * ALPHA}
    policy, critic = agents_of(env, sizes)
    stock = Collector(env, policy, **frames)
    wanted = learn(stock, policy, critic, env)
    stock.shutdown()
    runs = []
    for envs in ([partial(make_group, *LENGTHS)], [partial(make_group, 2, 5),
                                                   partial(make_group, 3, 4, 6, 7)]):  # fmt: skip
        policy, critic = agents_of(env, sizes)
        with start(envs, policy, lag=0, **frames) as collector:
            runs.append(learn(collector, policy, critic, env))
    assert layout_of(runs[0][0]) == layout_of(wanted[0])
    assert all((one == other).all() for one, other in zip(*runs, strict=True))
    rewards = torch.cat(runs[0], 1)["next", "agents", "episode_reward"]
    assert rewards.shape == (K, 3 * ALPHA, 2, 1)
    assert rewards.max() > 3


def test_vmas() -> None:
    """Many worlds of several agents, simulated as one."""
    pytest.importorskip("vmas")
    make = partial(VmasEnv, "balance", num_envs=K, continuous_actions=False, n_agents=2, seed=0)
    env = make(max_steps=6)
    policy, _ = agents_of(env, {"n_agent_inputs": 16, "n_agent_outputs": 9})
    kwargs: dict[str, Any] = {"policy": policy, "rounds": 3}
    batch = collect([partial(make, max_steps=6)], **kwargs)
    assert batch["next", "agents", "reward"].shape == (K, 3 * ALPHA, 2, 1)
    assert (collect([partial(make, max_steps=6)], **kwargs) == batch).all()
    ended = batch["next", "done"].squeeze(-1)[:, :-1]
    assert ended.sum() >= K
    same = batch["agents", "observation"][:, 1:] == batch["next", "agents", "observation"][:, :-1]
    assert (same.flatten(2).all(2) != ended).all(), "the true last observation, then a first one"


def test_i7_batches_of_vmas_that_share_a_process() -> None:
    """VMAS keeps one random state for a whole process; each batch draws from its own."""
    pytest.importorskip("vmas")
    make = partial(VmasEnv, "balance", num_envs=2, continuous_actions=False, n_agents=2)
    policy, _ = agents_of(make(max_steps=6), {"n_agent_inputs": 16, "n_agent_outputs": 9})
    envs = [partial(make, max_steps=6 + n) for n in range(3)]
    runs = [collect(envs, policy=policy, rounds=3, num_executors=n) for n in (1, 2, 3)]
    assert (runs[0] == runs[1]).all()
    assert (runs[0] == runs[2]).all()
    first = runs[0]["agents", "observation"][:, 0]
    assert len({one.numpy().tobytes() for one in first}) == K, "no two begin alike"
