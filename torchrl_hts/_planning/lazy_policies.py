"""Policies whose layers learn from the first rows how wide they are, such as TorchRL's `MLP`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._planning.trial_rows import make_up

__all__ = ["initialise"]


def initialise(policy: TensorDictModuleBase, make_env: Callable[[], Any]) -> None:
    """Give lazy parameters their values, which are drawn from torch's generator.

    As TorchRL's collectors do it: the policy is run once, on zeros of what an environment gives.
    That is made here, in this process, and closed.

    Args:
        policy: changed in place where it is lazy, and left alone elsewhere.
        make_env: makes an environment, or a batch of them.
    """
    lazy = [parameter for parameter in policy.parameters() if is_lazy(parameter)]
    if not lazy:
        return
    env = make_env()
    try:
        with torch.random.fork_rng(devices=[]):
            rows = _zeros(env, policy)
    finally:
        env.close()
    exploration = set_exploration_type(ExplorationType.DETERMINISTIC)
    with torch.no_grad(), exploration, _evaluating(policy):
        policy(rows.to(lazy[0].device))


def _zeros(env: Any, policy: nn.Module) -> TensorDictBase:
    """A few rows of all that an environment gives where an episode starts."""
    if isinstance(env, EnvBase):
        rows = env.fake_tensordict().exclude("next")
        return rows if rows.batch_dims else rows.unsqueeze(0)
    spaces = env.observation_space, env.action_space
    if isinstance(env, VectorEnv):
        spaces = env.single_observation_space, env.single_action_space
    return make_up(GymDescription(*spaces), policy, 1, 0).root[:2].clone().zero_()


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """A module in evaluation mode, its parts afterwards in the modes that they were in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
