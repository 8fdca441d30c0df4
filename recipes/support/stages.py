"""Where an environment of a run plays once more: gymnasium's alone, TorchRL's with its whole batch.

Axes: k environments that step as one, of which one is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from support.errors import RecipeError
from support.films import frame_of
from torchrl_hts import EnvironmentReplay, TorchRLReplay

Key = str | tuple[str, ...]

_OF_EPISODES = (("next", "done"), ("collector", "traj_ids"))

__all__ = ["GymStage", "Stage", "TorchRLStage", "stage_of"]


class Stage(Protocol):
    """Where the steps of a run are played again.

    Attributes:
        envs: the numbers of the environments that step as one.
        keys: of a batch, that steps are played again by.
        action_key: of the actions.
        meanings: what the actions are called; None where they have no names.
        fps: frames per second that it is shown at, as it says itself.
        shows_ends: whether the end of an episode can be seen, before the next one begins.
    """

    envs: range
    keys: Sequence[Key]
    action_key: Key
    shows_ends: bool
    meanings: list[str] | None
    fps: float | None

    def begin(self, saved: Tensor | None) -> None:
        """Begin where the run has begun, or go on from a state of a checkpoint."""

    def step(self, steps: TensorDictBase) -> None:
        """Play a step of a batch, ``[k]``, again; begins no other episode.

        Raises:
            RecipeError: if what happens is not what has happened.
        """

    def next_episode(self) -> None:
        """Begin the next one, if the last step has ended one."""

    def fail(self, steps: TensorDictBase) -> None:
        """Play the step that has failed, of which a batch has the actions alone."""

    def frame(self, env: int) -> Any:
        """What an environment looks like; ``[height, width, 3]``."""

    def save(self) -> Tensor:
        """Its state.

        Raises:
            CannotSaveError: if it has none that can be saved.
        """

    def close(self) -> None:
        """Close it."""


class GymStage:
    """A gymnasium environment."""

    keys = ("action", ("next", "reward"), *_OF_EPISODES)
    action_key = "action"
    shows_ends = True

    def __init__(self, make_env: Callable[[], Any], env: int, seed: int) -> None:
        self._replay = EnvironmentReplay(make_env, env, seed=seed)
        shown = self._replay.env
        self.envs = range(env, env + 1)
        self.meanings = getattr(shown.unwrapped, "get_action_meanings", lambda: None)()
        self.fps = shown.metadata.get("render_fps")
        self._ended = False

    def begin(self, saved: Tensor | None) -> None:
        """See `Stage`."""
        if saved is None:
            self._replay.reset()
        else:
            self._replay.restore(saved)

    def step(self, steps: TensorDictBase) -> None:
        """See `Stage`."""
        (step,) = steps
        expected, done = step["next", "reward"].item(), bool(step["next", "done"])
        reward, self._ended = self._replay.step(step["action"])
        if np.float32(reward) != expected or self._ended != done:
            raise RecipeError(
                f"the environment doesn't play again as it did: a step gave a reward of "
                f"{reward} and {'an' if self._ended else 'no'} end, and in the run {expected} and "
                f"{'an' if done else 'no'} end; something outside of it decides what happens"
            )

    def next_episode(self) -> None:
        """See `Stage`."""
        if self._ended:
            self._replay.begin_episode()

    def fail(self, steps: TensorDictBase) -> None:
        """See `Stage`."""
        _, ended = self._replay.step(steps[0]["action"])
        if ended:
            self._replay.begin_episode()

    def frame(self, env: int) -> Any:
        """See `Stage`."""
        return frame_of(self._replay.env)

    def save(self) -> Tensor:
        """See `Stage`."""
        return self._replay.save()

    def close(self) -> None:
        """See `Stage`."""
        self._replay.close()


class TorchRLStage:
    """A TorchRL environment, or a batch of them. Where an episode ends the next one has begun."""

    meanings = None
    fps = None
    shows_ends = False

    def __init__(self, make_env: Callable[[], Any], env: int, seed: int) -> None:
        self._replay = TorchRLReplay(make_env, env, seed=seed)
        self.envs = self._replay.envs
        env_ = self._replay.env
        self._given = (*env_.reward_keys, *env_.done_keys)
        given = [("next", *((key,) if isinstance(key, str) else key)) for key in self._given]
        self.keys = (*env_.action_keys, ("next", "reward"), *_OF_EPISODES, *given)
        self.action_key = env_.action_keys[0]

    def begin(self, saved: Tensor | None) -> None:
        """See `Stage`."""
        if saved is None:
            self._replay.reset()
        else:
            self._replay.restore(saved)

    def step(self, steps: TensorDictBase) -> None:
        """See `Stage`."""
        after, expected = self._replay.step(steps), steps["next"]
        for key in self._given:
            if not torch.equal(after[key].cpu(), expected[key]):
                name = key if isinstance(key, str) else "/".join(key)
                raise RecipeError(
                    f"the environments don't play again as they did: a step gave another {name} "
                    "than in the run; something outside of them decides what happens"
                )

    def next_episode(self) -> None:
        """See `Stage`."""

    def fail(self, steps: TensorDictBase) -> None:
        """See `Stage`."""
        self._replay.step(steps)

    def frame(self, env: int) -> Any:
        """See `Stage`."""
        shown = self._replay.env
        if shown.batch_size:
            return shown.render(mode="rgb_array", env_index=env - self.envs.start)
        return shown.render()

    def save(self) -> Tensor:
        """See `Stage`."""
        return self._replay.save()

    def close(self) -> None:
        """See `Stage`."""
        self._replay.close()


def stage_of(make_env: Callable[[], Any], env: int, seed: int) -> Stage:
    """Where an environment of a run plays once more.

    Args:
        make_env: makes it, or the batch that it is in.
        env: its number.
        seed: of the run.

    Raises:
        RecipeError: if it is neither of gymnasium nor of TorchRL, or a gymnasium batch.
    """
    made = make_env()
    made.close()
    if isinstance(made, EnvBase):
        return TorchRLStage(make_env, env, seed)
    if isinstance(made, gym.Env) and not isinstance(made, gym.vector.VectorEnv):
        return GymStage(make_env, env, seed)
    raise RecipeError(
        f"environments of {type(made).__name__} can't be played again: give the collector "
        "gymnasium's single ones, or TorchRL's"
    )
