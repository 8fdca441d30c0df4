"""What is stepped, and what is learned from it: the cells of the benchmark."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import _recipes  # noqa: F401  so that the recipes are found
import gymnasium as gym
import torch
from _dqn import DQN
from _environments import (
    SLEEP_MEAN_S,
    STRAGGLER_FACTOR,
    VARIATIONS,
    CostlessBatch,
    CostlessEnv,
    SleepEnv,
    StepTimes,
)
from a2c_atari import A2C
from a2c_atari import Options as A2COptions
from ppo_atari import Options as PPOOptions
from support.layers import orthogonal
from support.pixels import Agent
from support.ppo import PPO
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient
from torchrl_hts.delayed_gradient import GradientAt
from torchrl_hts.envs import make_atari, make_atari_batch, make_football, make_football_batch

CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Workload:
    """Environments, all alike but for their seeds.

    Attributes:
        description: what they are.
        factories: makes the factories of a number of plain gymnasium environments.
        waits: whether a step waits instead of computing, so that a process each is right.
        env_id: gymnasium's id, where it has one.
        slowest_step_s: the mean of the slowest environment's steps, where it is known: the ideal,
            in which no environment ever waits, is their number over it.
        variation: the standard deviation of a step's time over its mean, where it is known and the
            same for all.
        make_batch: makes so many of them as one gymnasium ``VectorEnv``; None where nobody does.
        batch: how many of them HTSCollector steps as one; the others step them one by one, but for
            loop-vector, which has a single batch of all.
    """

    description: str
    factories: Callable[[int], list[Callable[[], gym.Env[Any, Any]]]]
    waits: bool = False
    env_id: str | None = None
    slowest_step_s: float | None = None
    variation: float | None = None
    make_batch: Callable[[int], gym.vector.VectorEnv[Any, Any, Any]] | None = None
    batch: int = 1

    def units(self, num_envs: int) -> list[Callable[[], Any]]:
        """What HTSCollector is given: factories of single environments, or of batches.

        Raises:
            ValueError: if they don't come out even.
        """
        if self.batch == 1:
            return self.factories(num_envs)
        if num_envs % self.batch:
            raise ValueError(f"{num_envs} environments are no batches of {self.batch}")
        assert self.make_batch is not None
        return [partial(self.make_batch, self.batch)] * (num_envs // self.batch)


# No lambdas: some collectors send a workload to their processes.


def _sleepers(times: StepTimes, num_envs: int) -> list[Callable[[], gym.Env[Any, Any]]]:
    return [partial(SleepEnv, index, times) for index in range(num_envs)]


def _copies(
    make_env: Callable[[], gym.Env[Any, Any]], num_envs: int
) -> list[Callable[[], gym.Env[Any, Any]]]:
    return [make_env] * num_envs


def _sleeping(times: StepTimes, description: str) -> Workload:
    slowest = SLEEP_MEAN_S * (STRAGGLER_FACTOR if times == "straggler" else 1)
    return Workload(
        f"an environment that only sleeps, {description}",
        partial(_sleepers, times),
        waits=True,
        slowest_step_s=slowest,
        variation=VARIATIONS.get(times),
    )


def _alike(
    description: str,
    make_env: Callable[[], gym.Env[Any, Any]],
    env_id: str | None = None,
    make_batch: Callable[[int], gym.vector.VectorEnv[Any, Any, Any]] | None = None,
) -> Workload:
    make_batch = make_batch or partial(_sync, make_env)
    return Workload(description, partial(_copies, make_env), env_id=env_id, make_batch=make_batch)


def _sync(
    make_env: Callable[[], gym.Env[Any, Any]], num_envs: int
) -> gym.vector.VectorEnv[Any, Any, Any]:
    return gym.vector.SyncVectorEnv(
        [make_env] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )


def _game(env_id: str) -> Workload:
    description = f"{env_id}, 84x84 grey uint8, a stack of 4"
    return _alike(
        description, partial(make_atari, env_id), env_id, partial(make_atari_batch, env_id)
    )


WORKLOADS = {
    "costless": _alike("an environment that costs nothing", CostlessEnv, make_batch=CostlessBatch),
    "cartpole": _alike("CartPole-v1", partial(gym.make, "CartPole-v1"), "CartPole-v1"),
    "sleep": _sleeping("exponential", "exponential with a mean of 10 ms"),
    "sleep-constant": _sleeping("constant", "always 10 ms"),
    "sleep-gamma": _sleeping("gamma", "Gamma with a shape of 4 and a mean of 10 ms"),
    "sleep-lognormal": _sleeping("lognormal", "lognormal with a mean of 10 ms, heavy-tailed"),
    "sleep-straggler": _sleeping("straggler", "exponential, 10 ms, one environment 50 ms"),
    "pong": _game("ALE/Pong-v5"),
}


ENGINES = ("gfootball", "envpool")  # of football


def _football(scenario: str, engine: Any) -> Workload:
    make_env = partial(make_football, scenario, engine=engine, rewards="scoring,checkpoints")
    make_batch = partial(make_football_batch, scenario) if engine == "envpool" else None
    description = f"{scenario} on {engine}, 72x96 uint8, a stack of 4"
    return _alike(description, make_env, make_batch=make_batch)


def find_workload(name: str) -> Workload:
    """A workload by its name; any game of ALE by its id, of football as ``ENGINE/SCENARIO``.

    ``64xcostless`` is the workload ``costless`` in batches of 64.

    Raises:
        ValueError: if there is none of that name.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    if batched := re.fullmatch(r"([1-9]\d*)x(.+)", name):
        one = find_workload(batched[2])
        if one.make_batch is None:
            raise ValueError(f"{name!r}: nothing makes a batch of {one.description}")
        size = int(batched[1])
        return replace(one, description=f"{one.description}, batches of {size}", batch=size)
    kind, _, scenario = name.partition("/")
    if kind == "ALE":
        return _game(name)
    if kind in ENGINES and scenario:
        return _football(scenario, kind)
    raise ValueError(
        f"{name!r} is none of {', '.join(WORKLOADS)}, nor the id of a game of ALE, nor football's, "
        "such as gfootball/academy_3_vs_1_with_keeper; batches of 64 are 64x and one of these"
    )


@dataclass(frozen=True)
class Training:
    """What is done with a batch.

    Attributes:
        sync_interval: steps per environment and batch (alpha).
        algorithm: None only collects.
        mostly_learns: whether learning takes longer than all the rest, so that a learner of one
            thread would leave other cores idle.
        device: where batches lie and are learned from.
        policy_device: where the policy runs, of those who can have it elsewhere.
    """

    description: str
    sync_interval: int
    algorithm: type[A2C] | type[PPO] | type[DQN] | None = None
    mostly_learns: bool = False
    device: str = "cpu"
    policy_device: str = "cpu"


TRAININGS = {
    "collect": Training("collect only, alpha 20", 20),
    "collect5": Training("collect only, alpha 5", 5),
    "collect128": Training("collect only, alpha 128", 128),
    "a2c5": Training("A2C, unroll of 5 steps", 5, A2C),
    "a2c20": Training("A2C, unroll of 20 steps", 20, A2C),
    "ppo": Training("PPO, unroll of 128 steps, 4 epochs of 4 minibatches", 128, PPO, True),
    "dqn5": Training("DQN, alpha 5, an update of 32 items for every 4 steps", 5, DQN),
}


class TwoLayers(nn.Sequential):
    """The trunk for vectors: two layers of 64 with tanh."""

    def __init__(self, in_features: int) -> None:
        super().__init__(
            orthogonal(nn.Linear(in_features, 64), 2**0.5),
            nn.Tanh(),
            orthogonal(nn.Linear(64, 64), 2**0.5),
            nn.Tanh(),
        )


def make_agent(workload: Workload, device: str = "cpu") -> Agent:
    """The same network for all contenders: the Nature CNN for pixels, two layers for vectors."""
    torch.manual_seed(0)
    env = workload.factories(1)[0]()
    shape = env.observation_space.shape
    assert shape is not None
    agent = Agent(env) if len(shape) == 3 else Agent(env, TwoLayers(shape[0]), 64)
    env.close()
    return agent.to(device)


def make_policy(workload: Workload, training: Training) -> TensorDictSequential:
    """What collectors act with; actors give the values that PPO's advantages are made of."""
    agent = make_agent(workload)
    return policy_of(agent, training)


def policy_of(agent: Agent, training: Training) -> TensorDictSequential:
    """The part of an agent that acts."""
    return agent.actor_critic if training.algorithm is PPO else agent.policy


Learn = Callable[[TensorDictBase], None]


def make_learn(
    agent: Agent, training: Training, num_envs: int, lag: int | None, *, stock: bool = False
) -> Learn | None:
    """What is done with each batch ``[N, T]``; None if it is only collected.

    Args:
        lag: of the delayed update; None for an update without.
        stock: leave it to A2CLoss and GAE to run the shared trunk, as often as they do.

    Raises:
        ValueError: if `stock` is asked of anything but A2C.
    """
    if stock and training.algorithm is not A2C:
        raise ValueError("TorchRL's own update is measured with A2C alone")
    if training.algorithm is None:
        return None
    never = 2**31  # the learning rate stays what it is
    if training.algorithm is PPO:
        batch_size = num_envs * training.sync_interval
        ppo = PPO(agent, PPOOptions(epochs=4, minibatch_size=batch_size // 4), never)
        model: nn.Module = ppo.model

        def update(batch: TensorDictBase) -> None:
            for _ in ppo.learn(batch):
                pass

    elif training.algorithm is DQN:
        dqn = DQN(agent)
        model, update = dqn.model, dqn.learn
    elif stock:
        model, update = _stock_a2c(agent)
    else:
        a2c = A2C(agent, A2COptions(), never)
        model = a2c.model

        def update(batch: TensorDictBase) -> None:
            a2c.learn(batch)

    if lag is None:
        return update
    # What is in a buffer was gathered with many parameters, whatever the lag.
    at: GradientAt = "newest" if training.algorithm is DQN else "behaviour"
    delayed = DelayedGradient(model, lag=lag, gradient_at=at)

    def delayed_update(batch: TensorDictBase) -> None:
        with delayed(batch):
            update(batch)

    return delayed_update


def _stock_a2c(agent: Agent) -> tuple[nn.Module, Learn]:
    """A2C as TorchRL's loss and estimator do it by themselves with a shared trunk."""
    options = A2COptions()
    actor = ProbabilisticActor(
        TensorDictSequential(agent.trunk, agent.logits),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = TensorDictSequential(agent.trunk, agent.critic_head)
    advantage = GAE(gamma=options.gamma, lmbda=options.gae_lambda, value_network=critic)
    loss_module = A2CLoss(
        actor,
        critic,
        entropy_coeff=options.entropy_coefficient,
        critic_coeff=options.critic_coefficient,
        loss_critic_type="l2",
    )
    optimizer = torch.optim.RMSprop(
        loss_module.parameters(), lr=options.learning_rate, alpha=0.99, eps=1e-5
    )

    def update(batch: TensorDictBase) -> None:
        with torch.no_grad():
            advantage(batch)
        losses = loss_module(batch.reshape(-1))
        loss: Tensor = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        loss.backward()
        nn.utils.clip_grad_norm_(loss_module.parameters(), options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return loss_module, update
