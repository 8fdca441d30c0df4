"""One environment of a collector once more, outside of it: what a batch has of it, step by step."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_actions import action_reader
from torchrl_hts._executor.observations import ObservationReader
from torchrl_hts._executor.old_gym import checked_reset, of_done, of_step
from torchrl_hts._executor.own_seeds import own_draws, unseeded_spaces
from torchrl_hts._executor.spaces import all_layers, own_spaces, seed_spaces
from torchrl_hts._executor.values import checked_reward
from torchrl_hts._learner.learner import environment_seed
from torchrl_hts._learner.packing import to_bytes, to_tensor
from torchrl_hts._planning.action_checks import check_gym_action
from torchrl_hts._planning.arguments import check_factory
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Array
from torchrl_hts.env_state import names_of, restore_environment, save_environment
from torchrl_hts.env_state.compressed import compressed, decompressed
from torchrl_hts.errors.checks import check_integer

__all__ = ["EnvironmentReplay"]


class EnvironmentReplay:
    """An environment of a collector once more, in this process, by the actions of its batches.

    It is made, seeded and put into saved states as the collector's is. So the same actions lead to
    the same observations and rewards, bit for bit: to film it, or to look into it with a debugger.
    What it draws from ``random``, ``np.random`` and torch's default generator comes from states of
    its own, which take the place of this process's.

    Args:
        create_env_fn: makes the `gymnasium.Env` that the collector has, maybe with another
            ``render_mode``.
        env: its number among the environments of all learners. Those before it must be single ones
            if it draws from such generators while it is made.
        seed: of the collector.

    Attributes:
        env: the environment.

    Raises:
        TypeError: if nothing makes an environment, or it is no `gymnasium.Env`, or a batch of them.

    Example:
        >>> import functools, torch
        >>> from torchrl_hts import HTSCollector
        >>> make_env = functools.partial(gym.make, "CartPole-v1")
        >>> with HTSCollector([make_env] * 2, frames_per_batch=8, total_frames=8, seed=3) as data:
        ...     (batch,) = data
        >>> replay = EnvironmentReplay(make_env, 1, seed=3)
        >>> replay.reset()
        >>> rewards = [replay.step(action)[0] for action in batch["action"][1]]
        >>> rewards == batch["next", "reward"][1].flatten().tolist()
        True
    """

    @own_draws()
    @unseeded_spaces()
    def __init__(
        self, create_env_fn: Callable[[], gym.Env[Any, Any]], env: int, *, seed: int
    ) -> None:
        factory, *_ = check_factory(create_env_fn)
        self._number = check_integer("env", env, least=0)
        self._seed = check_integer("seed", seed, least=0, most=None)
        self._generators = Generators(self._seed, self._number)
        self._generators.enter()
        made: Any = factory()
        if isinstance(made, gym.vector.VectorEnv) or not isinstance(made, gym.Env):
            raise TypeError(
                "EnvironmentReplay plays a single gymnasium environment; its factory made a "
                f"{type(made).__module__}.{type(made).__qualname__}"
            )
        self.env: gym.Env[Any, Any] = made
        own_spaces(self.env)
        self._names = names_of(self.env)
        self._read = ObservationReader(self.env.observation_space).read

    @own_draws()
    def reset(self) -> None:
        """Begin as the collector's environment does in round 0."""
        seed = environment_seed(self._seed, self._number, 0)
        self._generators.seed(seed)
        seed_spaces(self.env, seed)
        self._generators.enter()
        self._read(checked_reset(self.env.reset(seed=seed)))

    def restore(self, saved: Tensor) -> None:
        """Go on from a state.

        Args:
            saved: what `save` returned, or its entry of a collector's
                ``state_dict()["environments"]``.

        Raises:
            ValueError: if it is damaged, or of an environment of another make.
        """
        kept = [(layer, vars(layer).get("render_mode")) for layer in all_layers(self.env)]
        self._generators.enter()
        state = decompressed(to_bytes(saved))
        extra = restore_environment(self.env, state, names=self._names)
        if not isinstance(extra, tuple):
            raise ValueError(
                "the state is of save_environment alone, without the generators of a collector's: "
                "give what save returned, or an entry of state_dict()['environments']"
            )
        self._generators.restore(extra[-1])
        for layer, mode in kept:  # which is no part of what happens in it
            if mode is not None:
                vars(layer)["render_mode"] = mode

    @own_draws()
    def step(self, action: Any) -> tuple[float, bool]:
        """One step; begins no other episode.

        What it returns is looked at as the collector does.

        Args:
            action: ``batch["action"][env, t]``, as the policy wrote it; numbers and arrays, too.

        Returns:
            The reward, and whether the episode ends by the environment itself.

        Raises:
            TypeError, ValueError: if the action is none of its space, in kind or size.
            InvalidValueError: if it returns NaN, or what its spaces don't allow.
        """
        found: dict[Key, Tensor] = {}

        def rows(*key: str) -> list[Array]:
            found[key] = _part(action, key)[None]
            return [found[key].numpy()]

        read = action_reader(self.env.action_space, ("action",), rows)
        check_gym_action(self.env.action_space, ("action",), found)
        _refuse_rows(self.env.action_space, found)
        taken = read(0, 0)
        self._generators.enter_step()
        try:
            observation, reward, terminated, truncated, _ = self.env.step(taken)
        except (TypeError, ValueError) as error:
            if (told := of_step(error)) is not None:
                raise told from error
            raise
        self._read(observation)
        number = checked_reward(reward)
        try:
            return number, bool(terminated or truncated)
        except (TypeError, ValueError) as error:  # arrays, as of several environments
            raise of_done(terminated, truncated) from error

    @own_draws()
    def begin_episode(self) -> None:
        """Begin the next episode, as the collector does within the step that ends one."""
        self._generators.enter()
        self._read(checked_reset(self.env.reset()))

    def save(self) -> Tensor:
        """Its state, for `restore` of another one.

        Raises:
            CannotSaveError: if it holds something that can't be saved.
        """
        self._generators.enter()
        state = save_environment(self.env, (self._generators.state(),), names=self._names)
        return to_tensor(compressed(state))

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def _part(action: Any, key: Key) -> Tensor:
    """The part of an action that is of one space, on the CPU."""
    try:
        for name in key[1:]:
            action = action[name]
        return torch.as_tensor(action).detach().cpu().contiguous()
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        raise TypeError(
            f"the action must be a tensor, such as batch['action'][env, t], and one for each part "
            f"of a Dict space; got {reprlib.repr(action)}"
        ) from error


def _refuse_rows(space: gym.Space[Any], found: Mapping[Key, Tensor]) -> None:
    """Raise ValueError for indices of several environments, which are no action of one."""
    ((_, action), *_) = found.items()
    one_hot = isinstance(space, gym.spaces.Discrete) and action.numel() > 1
    if one_hot and int((action == action.max()).sum()) > 1:
        raise ValueError(
            f"the action {action[0].tolist()} is neither an index of {space} nor one-hot: give "
            "that of one environment at one step, batch['action'][env, t]"
        )
