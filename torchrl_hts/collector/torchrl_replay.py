"""A TorchRL environment of a collector once more, outside of it, or a batch of them.

Axes: k environments of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.own_seeds import own_draws, unseeded_spaces
from torchrl_hts._executor.torchrl_env import TorchRLEnvironment, copy_value
from torchrl_hts._learner.learner import environment_seed
from torchrl_hts._learner.packing import to_bytes, to_tensor
from torchrl_hts._planning.arguments import check_factory
from torchrl_hts._rounds.entries import is_private, leaves
from torchrl_hts.errors.batches import check_batch
from torchrl_hts.errors.checks import check_integer

__all__ = ["TorchRLReplay"]


class TorchRLReplay:
    """A TorchRL environment of a collector once more, in this process, by its batches' actions.

    What `EnvironmentReplay` is for gymnasium environments. A batch of environments steps as one, so
    that all of it is had once more, by the actions of all. It begins where the collector has begun
    (`reset`), or goes on from a state of the collector's (`restore`). Of a ``SerialEnv`` or
    ``ParallelEnv`` the one environment plays alone, as it does in the collector. All entries of the
    collector's ``create_env_fn`` must make equally many environments: the number alone tells which
    batch it is.

    Args:
        create_env_fn: makes the environment, or the batch, that the collector has.
        env: its number among the environments of all learners, or that of one in the batch.
        seed: of the collector.
        max_frames_per_traj: of the collector.

    Attributes:
        env: the environment.
        envs: the numbers of its environments; one, where it is no batch.

    Raises:
        TypeError: if the factory makes no TorchRL environment.

    Example:
        >>> import functools, torch
        >>> from torchrl.envs import GymEnv
        >>> from torchrl_hts import HTSCollector
        >>> make_env = functools.partial(GymEnv, "CartPole-v1")
        >>> with HTSCollector([make_env] * 2, frames_per_batch=8, total_frames=8, seed=3) as data:
        ...     (batch,) = data
        >>> replay = TorchRLReplay(make_env, 1, seed=3)
        >>> first = replay.reset()
        >>> for step in batch[replay.envs.start : replay.envs.stop].unbind(1):
        ...     after = replay.step(step)
        >>> torch.equal(after["observation"], step["next", "observation"])
        True
    """

    @own_draws()
    @unseeded_spaces()
    def __init__(
        self,
        create_env_fn: Callable[[], EnvBase],
        env: int,
        *,
        seed: int,
        max_frames_per_traj: int = 0,
    ) -> None:
        self._most_frames = check_integer("max_frames_per_traj", max_frames_per_traj, least=0)
        number = check_integer("env", env, least=0)
        self._seed = check_integer("seed", seed, least=0, most=None)
        factories = check_factory(create_env_fn)
        create_env_fn = factories[number % len(factories)]
        self._made = self._make(create_env_fn, number)
        count = self._made.env.batch_size.numel()
        if count > 1:  # what it draws while it is made depends on the number of its batch
            self._made.close()
            self._made = self._make(create_env_fn, number // count)
        self.env: EnvBase = self._made.env
        self.envs = range(number // count * count, (number // count + 1) * count)
        transition = dict(leaves(self._made.description.transition))
        self._given = {*transition}
        self._given -= set(self._made.description.action_keys)
        size = self.env.batch_size
        self._rows = {
            key: value.expand(*size, *value.shape).clone()
            for key, value in transition.items()
            if key[0] == "next" and not is_private(key)
        }

    def _make(self, create_env_fn: Callable[[], EnvBase], unit: int) -> TorchRLEnvironment:
        generators = Generators(self._seed, unit)
        generators.enter()
        made: Any = create_env_fn()
        if not isinstance(made, EnvBase):
            raise TypeError(
                "TorchRLReplay plays a TorchRL environment, or a batch of them; its factory made a "
                f"{type(made).__module__}.{type(made).__qualname__}"
            )
        return TorchRLEnvironment(made, unit, generators, max_frames_per_traj=self._most_frames)

    @own_draws()
    def reset(self) -> TensorDictBase:
        """Begin as the collector's does in round 0.

        Returns:
            What it shows at first, ``[k]``; of a single environment ``[1]``.
        """
        seeds = [environment_seed(self._seed, number, 0) for number in self.envs]
        self._current = self._made.begin(seeds)
        self._episode = torch.zeros(self.env.batch_size, dtype=torch.int64)
        first: TensorDictBase = self._current.clone()
        return first if self.env.batch_size else first.unsqueeze(0)

    @own_draws()
    def restore(self, saved: Tensor) -> None:
        """Go on from a state.

        Args:
            saved: what `save` returned, or its entry of a collector's
                ``state_dict()["environments"]``; there is one of each batch.

        Raises:
            ValueError: if it is damaged, or of an environment of another make.
        """
        self._current, self._episode = self._made.restore_from(to_bytes(saved))

    @own_draws()
    def step(self, transition: TensorDictBase) -> TensorDictBase:
        """One step; where an episode ends the next one begins.

        What it returns is looked at as the collector does.

        Args:
            transition: ``batch[envs, t]``, of shape ``[k]``, with what the policy wrote; of a
                single environment ``[1]``.

        Returns:
            What the step has given: of all environments, the entry ``"next"`` of such a transition.

        Raises:
            InvalidValueError: if it returns NaN, or what its specs don't allow.
        """
        check_batch(transition)
        batched = bool(self.env.batch_size)
        for key, value in leaves(transition.exclude("next", "collector")):
            if key not in self._given:
                own = value if batched else value[0]
                self._current.set(key, own.to(self.env.device or own.device, copy=True))
        done_step, self._current = self._made.advance(self._current)
        for key, row in self._rows.items():
            copy_value(key, done_step.get(key), row)
        after: TensorDictBase = done_step.get("next")
        return after if batched else after.unsqueeze(0)

    def save(self) -> Tensor:
        """The state after a step, for `restore` of another one.

        Raises:
            CannotSaveError: if it holds something that can't be saved.
        """
        return to_tensor(self._made.save_with(self._current, self._episode))

    def close(self) -> None:
        """Close the environment."""
        self._made.close()
