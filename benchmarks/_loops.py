"""Plain synchronous loops over vector environments: one forward pass, then one step of all.

The environments are gymnasium's AsyncVectorEnv (a process each), PufferLib's (a process for each
core, or none), ale_py's AtariVectorEnv and EnvPool (threads in C++), or the batch that a workload
makes. Where an episode has ended the next step resets it, and counts as a step.

Axes: N environments, T steps of one batch (alpha).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from _workloads import CORES, Training, Workload
from support.pixels import Agent
from support.ppo import PPO
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = [
    "make_ale_loop",
    "make_envpool_loop",
    "make_gymnasium_loop",
    "make_puffer_loop",
    "make_vector_loop",
]


class Loop:
    """Yields batches ``[N, T]`` as TorchRL's collectors do, and gathers them in this process.

    Args:
        envs: a vector environment with gymnasium's interface; owned.
        agent: of which the plain modules are called.
        training: what its batches are for.
    """

    def __init__(self, envs: Any, agent: Agent, training: Training) -> None:
        self._envs = envs
        self._trunk = agent.trunk.module
        self._logits = agent.logits.module
        self._critic = agent.critic_head.module
        self._num_steps = training.sync_interval
        self._keeps_values = training.algorithm is PPO
        self._device = training.device

    def __iter__(self) -> Iterator[TensorDictBase]:
        observation, _ = self._envs.reset()
        while True:
            steps = []
            for _ in range(self._num_steps):
                # Vector environments hand out arrays that they may write to again: all are copied.
                step = self._act(self._taken(observation))
                observation, reward, terminated, truncated, _ = self._envs.step(
                    step["action"].numpy(force=True)
                )
                steps.append(step | _outcome(reward, terminated, truncated))
            yield _stack(steps, self._taken(observation)).to(self._device)

    def _taken(self, observation: Any) -> Tensor:
        """A copy on the device."""
        return torch.from_numpy(np.array(observation)).to(self._device)

    @torch.no_grad()
    def _act(self, observation: Tensor) -> dict[str, Tensor]:
        hidden = self._trunk(observation)
        policy = torch.distributions.Categorical(logits=self._logits(hidden), validate_args=False)
        action = policy.sample()
        values = {"state_value": self._critic(hidden)} if self._keeps_values else {}
        return {
            "observation": observation,
            "action": action,
            "action_log_prob": policy.log_prob(action),
            **values,
        }

    def update_policy_weights_(self) -> None:
        """Nothing to do: it acts with the learner's own parameters."""

    def shutdown(self) -> None:
        self._envs.close()


def _outcome(reward: Any, terminated: Any, truncated: Any) -> dict[str, Tensor]:
    return {
        "reward": torch.from_numpy(np.array(reward, np.float32)).unsqueeze(-1),
        "terminated": torch.from_numpy(np.array(terminated, bool)).unsqueeze(-1),
        "truncated": torch.from_numpy(np.array(truncated, bool)).unsqueeze(-1),
    }


def _stack(steps: list[dict[str, Tensor]], last: Tensor) -> TensorDictBase:
    """T steps of N rows each, and the observation after them, as a batch ``[N, T]``.

    Some of it may be on another device than the rest.
    """
    columns = {name: torch.stack([step[name] for step in steps], 1) for name in steps[0]}
    observations = torch.cat([columns.pop("observation"), last.unsqueeze(1)], 1)  # [N, T + 1]
    following = {name: columns.pop(name) for name in ("reward", "terminated", "truncated")}
    following["done"] = following["terminated"] | following["truncated"]
    following["observation"] = observations[:, 1:]
    shape = following["done"].shape[:2]
    columns["observation"] = observations[:, :-1]
    return TensorDict({**columns, "next": TensorDict(following, shape)}, shape)


def make_gymnasium_loop(
    workload: Workload, training: Training, num_envs: int, agent: Agent
) -> Loop:
    """Over gymnasium's AsyncVectorEnv: a process for each environment."""
    envs = gym.vector.AsyncVectorEnv(workload.factories(num_envs))
    return Loop(envs, agent, training)


def make_ale_loop(workload: Workload, training: Training, num_envs: int, agent: Agent) -> Loop:
    """Over the vector environment of ale_py, with a thread for each core.

    Raises:
        ValueError: if the workload isn't a game of ALE.
    """
    if not (workload.env_id or "").startswith("ALE/"):
        raise ValueError("AtariVectorEnv plays games of ALE only")
    from ale_py.vector_env import AtariVectorEnv

    game = gym.spec(workload.env_id).kwargs["game"]
    return Loop(AtariVectorEnv(game, num_envs, num_threads=CORES), agent, training)


def make_envpool_loop(workload: Workload, training: Training, num_envs: int, agent: Agent) -> Loop:
    """Over EnvPool, with a thread for each core.

    Raises:
        ValueError: if EnvPool has no such environment.
    """
    if workload.env_id is None:
        raise ValueError("EnvPool has no such environment")
    import envpool

    env_id = workload.env_id.removeprefix("ALE/")
    envs = envpool.make_gymnasium(env_id, num_envs=num_envs, num_threads=CORES, seed=0)
    return Loop(envs, agent, training)


def make_puffer_loop(
    workload: Workload, training: Training, num_envs: int, agent: Agent, *, serial: bool = False
) -> Loop:
    """Over PufferLib's vectorisation: all in this process, or a process for each core, which spins.

    Raises:
        ValueError: if the cores can't have equally many environments.
    """
    if not serial and num_envs % CORES:
        raise ValueError(f"{num_envs} environments can't be shared out among {CORES} cores")
    from pufferlib.vector import Multiprocessing, Serial  # its `make` takes no list of factories

    factories = [partial(_for_puffer, factory) for factory in workload.factories(num_envs)]
    each: list[list[Any]] = [[]] * num_envs
    settings: list[dict[str, Any]] = [{}] * num_envs
    made = partial(Serial if serial else Multiprocessing, factories, each, settings, num_envs)
    return Loop(made() if serial else made(num_workers=CORES), agent, training)


def _for_puffer(factory: Callable[[], gym.Env[Any, Any]]) -> Any:
    from pufferlib.emulation import GymnasiumPufferEnv

    class Ending(GymnasiumPufferEnv):
        """Is reset after an episode that was cut, too: 1.0.1 looks for terminated ones alone."""

        def step(self, action: Any) -> Any:
            outcome = super().step(action)
            self.done = outcome[2] or outcome[3]
            return outcome

    return Ending(env=factory())


def make_vector_loop(workload: Workload, training: Training, num_envs: int, agent: Agent) -> Loop:
    """Over a single batch of all, of the kind that HTSCollector is given several of.

    Raises:
        ValueError: if nothing makes a batch of such environments.
    """
    if workload.make_batch is None:
        raise ValueError("nothing makes a batch of such environments")
    return Loop(workload.make_batch(num_envs), agent, training)
