"""Policies whose layers learn from the first rows how wide they are, such as TorchRL's `MLP`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_hts._executor.factories import with_transforms
from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._planning.policy_forms import transforms_of
from torchrl_hts._planning.trial_rows import make_up

__all__ = ["Example", "initialise"]


@dataclass(frozen=True)
class Example:
    """Of what policies of a collector are given.

    Attributes:
        make_env: makes an environment, or a batch of them.
        max_frames: length at which episodes are truncated; 0: never.
        registers: whether TorchRL environments get what recurrent policies need.
    """

    make_env: Callable[[], Any]
    max_frames: int
    registers: bool


def initialise(policy: TensorDictModuleBase, example: Example) -> None:
    """Give lazy parameters their values, which are drawn from torch's generator.

    As TorchRL's collectors do it: the policy is run once, on zeros of what an environment gives.
    That is made here, in this process, and closed.

    Args:
        policy: changed in place where it is lazy, and left alone elsewhere.
        example: of what it is given.
    """
    lazy = [value for value in (*policy.parameters(), *policy.buffers()) if is_lazy(value)]
    if not lazy:
        return
    make_env = example.make_env
    if example.registers:
        (make_env,) = with_transforms([make_env], transforms_of(policy))
    with torch.random.fork_rng(devices=[]):
        env = make_env()
        try:
            rows = _zeros(env, policy, example.max_frames)
        finally:
            env.close()
    exploration = set_exploration_type(ExplorationType.DETERMINISTIC)
    with torch.no_grad(), exploration, _evaluating(policy):
        policy(rows.to(lazy[0].device))


def _zeros(env: Any, policy: nn.Module, max_frames: int) -> TensorDictBase:
    """A few rows of all that an environment gives where an episode starts."""
    if isinstance(env, EnvBase):
        if max_frames:
            env = TransformedEnv(env, StepCounter(max_steps=max_frames), auto_unwrap=True)
        rows = env.fake_tensordict().exclude("next")
        return rows if rows.batch_dims else rows.unsqueeze(0)
    spaces = env.observation_space, env.action_space
    if isinstance(env, VectorEnv):
        spaces = env.single_observation_space, env.single_action_space
    return make_up(GymDescription(*spaces), policy, 1, max_frames).root[:2].clone().zero_()


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
