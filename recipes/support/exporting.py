"""A policy as a program of torch.export, which needs neither these recipes nor TorchRL.

Axes: B observations at a time.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import NestedKey, TensorDict
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from support.checkpoints import write_atomically
from support.errors import RecipeError
from support.exportable import exportable

__all__ = ["export"]

_OBSERVATIONS = 64  # that both are tried on, at least
_STEPS = 4  # that a memory is tried over

States = Mapping[str, Tensor]


class _Acting(nn.Module):
    """Observations ``[B, ...]`` to the likeliest actions ``[B, ...]``, and what is remembered."""

    def __init__(self, policy: TensorDictModuleBase) -> None:
        super().__init__()
        self.policy = _up_to_the_action(policy)
        read, written = self.policy.in_keys, self.policy.out_keys
        self.action = next(key for key in written if _is_action(key))
        self.states = [key for key in read if isinstance(key, str) and ("next", key) in written]
        observed = [key for key in read if key not in self.states and key != "is_init"]
        if len(observed) != 1:
            names = ", ".join(map(str, observed))
            raise RecipeError(f"policies that read {names} can't be exported: one entry is fed")
        (self.observed,) = observed

    def forward(self, observation: Tensor, states: States | None = None) -> Any:
        given = self._read(observation, **(states or {}))
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            written = self.policy(given)
        if not self.states:
            return written[self.action]
        return written[self.action], {name: written["next", name] for name in self.states}

    def zeros(self, observation: Tensor) -> States:
        """What it remembers before it has seen anything."""
        if not self.states:
            return {}
        written = self.policy(self._read(observation))
        return {name: torch.zeros_like(written["next", name]) for name in self.states}

    def _read(self, observation: Tensor, **states: Tensor) -> TensorDict:
        """What the policy reads; whoever feeds states of zeros begins an episode."""
        rows = observation.shape[0]
        is_init = observation.new_zeros(rows, 1, dtype=torch.bool)
        return TensorDict({self.observed: observation, "is_init": is_init, **states}, [rows])


def _up_to_the_action(policy: TensorDictModuleBase) -> TensorDictModuleBase:
    """The part of a policy that acts, without the values that it computes besides."""
    if type(policy) is not TensorDictSequential:
        return policy
    parts = []
    for part in policy.module:
        parts.append(part)
        if any(map(_is_action, part.out_keys)):
            break
    return TensorDictSequential(*parts)


def _is_action(key: NestedKey) -> bool:
    return (key if isinstance(key, str) else key[-1]) == "action"


def export(
    policy: TensorDictModuleBase, make_env: Callable[..., Any], file: Path
) -> tuple[int, dict[str, list[int]]]:
    """Write a policy down, read it back, and compare its actions.

    ``torch.export.load(file).module()(observation=observations)`` then gives the actions of
    observations ``[B, ...]``, B of any size. With a memory it takes ``states`` too, and gives the
    actions and the states that the next step takes.

    Args:
        policy: reads one entry of what is observed, and what it remembers.
        make_env: makes an environment to take observations from.
        file: in .pt2.

    Returns:
        The number of observations that were compared, and the shapes of the states without B.

    Raises:
        RecipeError: if the policy can't be exported, or acts in another way then.
    """
    acting = _Acting(policy).eval()
    observations = _observations(make_env, acting.observed)
    with torch.no_grad():
        states = acting.zeros(observations)
        program = _exported(acting, observations, states)
        content = io.BytesIO()
        torch.export.save(program, content)
        loaded = torch.export.load(content).module()
        for some in (observations, observations[:1]):
            if not _act_alike(acting, loaded, some, {k: v[: len(some)] for k, v in states.items()}):
                raise RecipeError("the exported policy gives other actions: it was not kept")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content.getbuffer())
    return len(observations), {name: list(state.shape[1:]) for name, state in states.items()}


def _exported(acting: _Acting, observations: Tensor, states: States) -> Any:
    """The program of torch.export."""
    rows = {0: torch.export.Dim("batch", min=1)}
    fed: dict[str, Any] = {"observation": observations}
    sizes: dict[str, Any] = {"observation": rows}
    if states:
        fed["states"], sizes["states"] = states, dict.fromkeys(states, rows)
    try:
        with warnings.catch_warnings():  # weights that a GRU's flat list names once more
            warnings.filterwarnings("ignore", "The tensor attributes .*_flat_weights")
            return torch.export.export(exportable(acting), (), fed, dynamic_shapes=sizes)
    except Exception as error:  # torch raises whatever it stumbles over
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise RecipeError(f"torch.export can't export this policy: {said[0]}") from error


def _act_alike(acting: nn.Module, loaded: nn.Module, observations: Tensor, states: States) -> bool:
    """Whether both give the same actions, and go on to remember the same."""
    if not states:
        return torch.equal(acting(observation=observations), loaded(observation=observations))
    for step in range(_STEPS):
        seen = observations.roll(step, 0)
        action, own = acting(observation=seen, states=states)
        other, states = loaded(observation=seen, states=states)
        same = [torch.equal(own[name], states[name]) for name in own]
        if not (torch.equal(action, other) and all(same)):
            return False
    return True


def _observations(make_env: Callable[..., Any], key: NestedKey) -> Tensor:
    """Of a game that is played at random: an entry of them, ``[B, ...]``."""
    env = make_env()
    if not isinstance(env, gym.Env):
        torch.manual_seed(0)
        env.set_seed(0)
        steps = -(-_OBSERVATIONS // env.batch_size.numel())
        played = env.rollout(steps, break_when_any_done=False)
        env.close()
        return played[key].flatten(0, len(env.batch_size)).clone()
    env.action_space.seed(0)
    found = [env.reset(seed=0)[0]]
    while len(found) < _OBSERVATIONS:
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        found.append(env.reset()[0] if terminated or truncated else observation)
    env.close()
    return torch.from_numpy(np.stack(found))
