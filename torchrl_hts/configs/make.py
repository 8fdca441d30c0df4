"""What the Hydra configurations of ``schema.py`` make: the collector, and the trainers' hook."""

from __future__ import annotations

import torchrl_hts._processes.versions  # noqa: F401  (before torchrl)

# isort: split

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from tensordict import TensorDict
from torch import nn
from torchrl.envs.utils import ExplorationType
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TrainerHookBase

from torchrl_hts._planning.batched_envs import around_each
from torchrl_hts.collector import HTSCollector
from torchrl_hts.delayed_gradient import DelayedGradient, GradientAt
from torchrl_hts.errors.checks import check_integer

__all__ = ["DelayedGradientHook", "make_collector"]

_BATCHED_ENV = "torchrl.trainers.algorithms.configs.envs.make_batched_env"
_TRANSFORMED_ENV = "torchrl.envs.TransformedEnv"


def make_collector(
    create_env_fn: Any,
    policy: Any = None,
    *,
    num_envs: int | None = None,
    num_workers: int | None = None,
    policy_factory: Any = None,
    create_env_kwargs: Any = None,
    exploration_type: str | ExplorationType = "RANDOM",
    **arguments: Any,
) -> HTSCollector:
    """The collector that `HTSCollectorConfig` describes.

    Args:
        create_env_fn, num_envs, num_workers, exploration_type: see `HTSCollectorConfig`.
        policy, policy_factory, create_env_kwargs: of `HTSCollector`, or their configurations.
        arguments: further ones of `HTSCollector`, or their configurations.

    Raises:
        TypeError, ValueError: for arguments that don't fit each other, here or in `HTSCollector`.
    """
    if OmegaConf.is_config(policy_factory):
        policy_factory = partial(instantiate, policy_factory, _partial_=False)
    return HTSCollector(
        _factories(create_env_fn, num_envs, num_workers),
        _made(policy),
        policy_factory=policy_factory,
        create_env_kwargs=_plain(create_env_kwargs),
        exploration_type=_exploration_type(exploration_type),
        **{name: _made(value) for name, value in arguments.items()},
    )


class DelayedGradientHook(TrainerHookBase):  # type: ignore[misc]  # torchrl is untyped
    """`DelayedGradient` for the trainer that it is registered with: Hydra makes hooks first.

    TorchRL's configurations make the policy twice, for the collector and for the loss, with
    parameters of their own. Rounds 0 to ``lag`` would be gathered with others than those that
    learn from them, so `register` makes the collector's policy hold the loss module's.

    Args:
        lag: of `DelayedGradient`; by default that of the trainer's collector.
        gradient_at: of `DelayedGradient`.
    """

    def __init__(self, lag: int | None = None, gradient_at: GradientAt = "behaviour") -> None:
        self.lag = lag
        self.gradient_at: GradientAt = gradient_at
        self._delayed: DelayedGradient | None = None

    def register(self, trainer: Trainer, name: str = "delayed_gradient") -> None:
        """Register a `DelayedGradient` of the trainer's loss module, under `name`.

        Raises:
            TypeError, ValueError, RuntimeError: as `DelayedGradient`, or if the collector's policy
                isn't of the same kind as the loss module's actor.
        """
        delayed = DelayedGradient(trainer.loss_module, lag=self.lag, gradient_at=self.gradient_at)
        _share_parameters(trainer)
        delayed.register(trainer, name)
        self._delayed = delayed

    def state_dict(self) -> dict[str, Any]:
        """That of the `DelayedGradient`, which the trainer saves and loads by itself."""
        return self._registered().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `state_dict`."""
        self._registered().load_state_dict(state_dict)

    def _registered(self) -> DelayedGradient:
        if self._delayed is None:
            raise RuntimeError("the hook has no state before it is registered with a trainer")
        return self._delayed

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lag={self.lag}, gradient_at={self.gradient_at!r})"


def _made(value: Any) -> Any:
    """What a configuration describes; anything else as it is."""
    return instantiate(value) if OmegaConf.is_config(value) else value


def _plain(value: Any) -> Any:
    """A configuration's content in Python's own containers; anything else as it is."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _factories(
    create_env_fn: Any, num_envs: int | None, num_workers: int | None
) -> list[Callable[..., Any]]:
    """A callable per environment."""
    if num_envs is not None:
        num_envs = check_integer("num_envs", num_envs)
    if num_workers is not None:
        num_workers = check_integer("num_workers", num_workers)
    if not isinstance(create_env_fn, ListConfig | list | tuple):
        factory, copies = _factory(create_env_fn)
        return [factory] * (num_envs or copies * (num_workers or 1))
    entries = [_factory(entry) for entry in create_env_fn]
    factories = [factory for factory, copies in entries for _ in range(copies)]
    for name, given in (("num_envs", num_envs), ("num_workers", num_workers)):
        if given not in (None, len(factories)):
            raise ValueError(
                f"{name}={given}, but create_env_fn lists {len(factories)} environments; give "
                f"one that is to be copied, or leave {name} out"
            )
    return factories


def _factory(source: Any) -> tuple[Callable[..., Any], int]:
    """A callable that makes an environment anew, and how many such environments there are."""
    if not OmegaConf.is_config(source):
        return source, 1
    if not isinstance(source, DictConfig) or "_target_" not in source:
        raise ValueError(
            "create_env_fn must be the configuration of an environment, with a _target_, such as "
            f"those of the group 'env'; got {source!r}"
        )
    if source._target_ == _BATCHED_ENV:
        factory, copies = _factory(source.create_env_fn)
        copies *= check_integer("num_workers of the batched environment", source.num_workers)
        kwargs = _plain(source.get("create_env_kwargs")) or {}
        if not isinstance(kwargs, Mapping):
            raise TypeError(
                "create_env_kwargs of the batched environment must be a mapping, got "
                f"{kwargs!r}; list environments with keywords of their own in create_env_fn of "
                "the collector"
            )
        return partial(factory, **kwargs), copies
    if source._target_ == _TRANSFORMED_ENV and _is_batched(source.get("base_env")):
        factory, copies = _factory(source.base_env)
        transform = instantiate(source.get("transform"))
        return factory if transform is None else around_each(factory, transform), copies
    config = OmegaConf.to_container(source, resolve=True, throw_on_missing=True)
    # Not what would be made here: each executor makes its own. And nothing but `instantiate` is
    # pickled, so that the executors of gymnasium environments import no torch.
    return partial(instantiate, config, _partial_=False), 1


def _is_batched(source: Any) -> bool:
    """Whether a configuration is that of a batched environment, with transforms or without."""
    while isinstance(source, DictConfig) and source.get("_target_") == _TRANSFORMED_ENV:
        source = source.get("base_env")
    return isinstance(source, DictConfig) and source.get("_target_") == _BATCHED_ENV


def _exploration_type(name: str | ExplorationType) -> ExplorationType:
    if isinstance(name, ExplorationType):
        return name
    if not isinstance(name, str) or name.upper() not in ExplorationType.__members__:
        known = ", ".join(ExplorationType.__members__)
        raise ValueError(f"exploration_type must be one of {known}; got {name!r}")
    return ExplorationType.from_str(name)


def _share_parameters(trainer: Trainer) -> None:
    """Make the collector's policy hold the parameters and buffers of the loss module's actor."""
    actor, policy = getattr(trainer.loss_module, "actor_network", None), trainer.collector.policy
    if not isinstance(actor, nn.Module):
        raise TypeError(
            f"the trainer's loss module, a {type(trainer.loss_module).__name__}, has no "
            "actor_network that the collector could act with"
        )
    theirs, ours = (
        {name: tensor.shape for name, tensor in (*m.named_parameters(), *m.named_buffers())}
        for m in (actor, policy)
    )
    if theirs != ours:
        wrong = sorted({name for name, _ in theirs.items() ^ ours.items()})
        raise ValueError(
            "the collector's policy isn't the loss module's actor: missing, unknown or of another "
            f"shape are {', '.join(wrong)}. Give both the same configuration."
        )
    TensorDict.from_module(actor).to_module(policy)
