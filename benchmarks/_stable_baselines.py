"""Stable-Baselines3's A2C and PPO, on the same networks, settings and environments."""

from __future__ import annotations

from typing import Any

import torch
from _dqn import DQN
from _workloads import Training, Workload, make_agent
from a2c_atari import Options as A2COptions
from ppo_atari import Options as PPOOptions
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from support import ppo
from torch import Tensor

__all__ = ["StableBaselines"]


class Trunk(BaseFeaturesExtractor):
    """Our trunk as Stable-Baselines3 takes one.

    Args:
        observation_space: given by Stable-Baselines3.
        workload: whose agent it is the trunk of.
    """

    def __init__(self, observation_space: Any, workload: Workload) -> None:
        agent = make_agent(workload)
        super().__init__(observation_space, features_dim=agent.logits.module.in_features)
        self.trunk = agent.trunk.module

    def forward(self, observation: Tensor) -> Tensor:
        return self.trunk(observation)


class StableBaselines:
    """Its A2C or PPO, a rollout at a time; environments in processes where their steps cost."""

    def __init__(self, workload: Workload, training: Training, num_envs: int, threads: int) -> None:
        env = workload.factories(1)[0]()
        costly = workload.waits or len(env.observation_space.shape or ()) == 3
        env.close()
        factories = workload.factories(num_envs)
        envs = SubprocVecEnv(factories) if costly else DummyVecEnv(factories)
        torch.set_num_threads(threads)
        # Images stay uint8 and are scaled by the trunk, not by Stable-Baselines3.
        network = {
            "features_extractor_class": Trunk,
            "features_extractor_kwargs": {"workload": workload},
            "net_arch": [],
            "normalize_images": False,
        }
        if training.algorithm is DQN:
            raise ValueError("Stable-Baselines3 is measured with A2C and PPO alone")
        self._learns = training.algorithm is not None
        options: A2COptions | PPOOptions = A2COptions()
        algorithm: type[OnPolicyAlgorithm] = A2C
        own: dict[str, Any] = {}
        if training.algorithm is ppo.PPO:
            options, algorithm = PPOOptions(), PPO
            own = {
                "batch_size": num_envs * training.sync_interval // 4,
                "n_epochs": 4,
                "clip_range": options.clip_epsilon,
                "clip_range_vf": options.clip_epsilon,
            }
        self._model = algorithm(
            "MlpPolicy",
            envs,
            learning_rate=options.learning_rate,
            n_steps=training.sync_interval,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
            ent_coef=options.entropy_coefficient,
            vf_coef=options.critic_coefficient,
            max_grad_norm=options.max_grad_norm,
            policy_kwargs=network,
            device=training.device,
            **own,
        )
        self._model.set_logger(Logger(None, []))
        never = 2**31
        _, self._callback = self._model._setup_learn(never, CallbackList([]))

    def advance(self) -> int:
        model = self._model
        model.collect_rollouts(
            model.env, self._callback, model.rollout_buffer, n_rollout_steps=model.n_steps
        )
        if self._learns:
            model.train()
        return int(model.n_steps * model.n_envs)

    def begin(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        batch = [self._model.n_envs, self._model.n_steps]
        return {"threads": torch.get_num_threads(), "batch": batch}

    def close(self) -> None:
        self._model.env.close()
