"""What a TorchRL environment shows before the first round: at resets, and in random play.

Of a batch of environments it is the first that is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_hts._executor.trial_observations import MOST_PLAYED, Observations, at_resets, kept

__all__ = ["TorchRLPlay", "torchrl_observations"]


class TorchRLPlay:
    """An environment and what it takes to play it at random; see `probe.RandomPlay`.

    Episodes of a batch that end are followed by others within the step.
    """

    def __init__(self, env: EnvBase) -> None:
        self.env = env
        self.played: list[tuple[int, TensorDictBase]] = []  # see `GymPlay`
        self._length = 0
        self._done_keys = env.done_keys

    def reset(self) -> None:
        """Begin an episode."""
        first = not self.played
        self._current = _reset(self.env, 0) if first else self.env.reset()
        self._length = 0
        if first:
            self._note()

    def choose(self) -> None:
        """Draw the next action."""
        if self._length and len(self.played) < MOST_PLAYED:
            self._note()
        self.env.rand_action(self._current)

    def _note(self) -> None:
        self.played.append((self._length, _one(self.env, self._current).clone()))

    def observations(self) -> Observations:
        """What there was to see, after resets with further seeds."""
        return torchrl_observations(self.env, self.played)

    def step(self) -> bool:
        """Make a step; returns whether there is an episode to begin."""
        if self.env.batch_size:
            step, self._current = self.env.step_and_maybe_reset(self._current)
            self._length = 0 if self._has_ended(_one(self.env, step)) else self._length + 1
            return False
        step = self.env.step(self._current)
        self._current = self.env.step_mdp(self._current)
        self._length += 1
        return self._has_ended(step)

    def _has_ended(self, step: TensorDictBase) -> bool:
        return any(bool(step.get("next").get(key).any()) for key in self._done_keys)


def _one(env: EnvBase, values: TensorDictBase) -> TensorDictBase:
    """What is of one environment."""
    return values[0] if env.batch_size else values


def _reset(env: EnvBase, seed: int) -> TensorDictBase:
    torch.manual_seed(seed)
    env.set_seed(seed)
    return env.reset()


def torchrl_observations(
    env: EnvBase, played: Sequence[tuple[int, TensorDictBase]] = ()
) -> Observations:
    """What an environment gives at its root at resets, and what random play met with.

    Args:
        env: the environment.
        played: steps since the reset, and what there was; a reset among them is that of seed 0.
    """
    known = [td for length, td in played if not length]
    resets = at_resets(lambda seed: _one(env, _reset(env, seed)).clone(), known)
    moments = [*((0, td) for td in resets), *(each for each in played if each[0])]
    tensors = [dict(_stackable(td)) for _, td in moments]
    # Not the action, which the last step leaves there.
    keys = [key for key in tensors[0] if all(key in each for each in tensors)]
    moments = moments[: kept(sum(tensors[0][key].nbytes for key in keys))]
    values = torch.stack([td.select(*keys).cpu() for _, td in moments]).contiguous()
    lengths = tuple(length for length, _ in moments)
    specs = env.full_action_spec.values(True, True)
    masked = any(getattr(spec, "mask", None) is not None for spec in specs)
    return Observations(values, lengths, min(len(resets), len(moments)), masked)


def _stackable(td: TensorDictBase) -> Iterable[tuple[Any, Tensor]]:
    for key, value in td.items(include_nested=True, leaves_only=True):
        if isinstance(value, Tensor) and not value.is_nested:
            yield key, value
