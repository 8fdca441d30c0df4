"""The dataclasses of the configurations; importing this module registers them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

__all__ = ["AtariEnvConfig", "DelayedGradientConfig", "GymnasiumEnvConfig", "HTSCollectorConfig"]


@dataclass
class HTSCollectorConfig:
    """Configuration of `HTSCollector`: ``collector=hts``.

    The fields are the collector's arguments, with the collector's defaults, apart from these:

    Args:
        create_env_fn: the configuration of one environment, made anew for each copy of it in the
            process that steps it, whatever its ``_partial_`` says; or a callable. TorchRL's
            ``batched_env`` is taken apart: its environments become the collector's, and nothing
            else of it counts. A list has one entry per environment.
        num_envs: how many environments, whatever `num_workers` says; by default `num_workers`,
            times those of a batched one.
        num_workers: what TorchRL's multi-process collectors call the number of copies of
            `create_env_fn`, so that a configuration written for one of them does here too.
        policy_factory: the configuration of the policy, which is made with the collector.
        exploration_type: the name of an `ExplorationType`.

    Other keys, such as those of TorchRL's collectors, are accepted here and handed on. The
    collector takes some of them, such as ``init_random_frames``, and says of each other that is set
    why it doesn't take it. ``~collector.<key>`` on the command line removes it.

    Example:
        >>> from hydra.utils import instantiate
        >>> from torch import nn
        >>> config = HTSCollectorConfig(
        ...     create_env_fn=GymnasiumEnvConfig(id="MountainCarContinuous-v0"),
        ...     num_envs=2,
        ...     policy={"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 1},
        ...     frames_per_batch=8,
        ...     total_frames=8,
        ... )
        >>> with instantiate(config) as collector:
        ...     print(*(batch.shape for batch in collector))
        torch.Size([2, 4])
    """

    create_env_fn: Any = MISSING
    num_envs: int | None = None
    num_workers: int | None = None
    policy: Any = None
    policy_factory: Any = None
    frames_per_batch: int = MISSING
    total_frames: int = -1
    lag: int = 1
    num_actors: int | None = None
    num_executors: int | None = None
    seed: int | None = None
    device: str | None = None
    storing_device: str | None = None
    policy_device: str | None = None
    env_device: str | None = None
    create_env_kwargs: Any = None
    exploration_type: str = "RANDOM"
    max_frames_per_traj: int | None = None
    postproc: Any = None
    split_trajs: bool = False
    set_truncated: bool = False
    compact_obs: bool = False
    info_keys: Any = None
    return_same_td: bool = False
    track_policy_version: bool = True
    actor_threads: int = 1
    timeline_events: int = 0
    on_executor_failure: str = "raise"
    max_restarts: int = 10
    restart_window_s: float = 600.0
    timeout_s: Any = None
    storage_dir: str | None = None
    pre_collect_hook: Any = None
    post_collect_hook: Any = None

    _target_: str = "torchrl_hts.configs.make.make_collector"
    _partial_: bool = False
    _recursive_: bool = False  # environments are made in the executors


@dataclass
class DelayedGradientConfig:
    """Configuration of `DelayedGradient` as a trainer's hook: ``hook=delayed_gradient``.

    It belongs into a trainer's list of hooks, ``trainer.hooks=[${hook}]``; the loss module is that
    trainer's.

    Args:
        lag: as of `DelayedGradient`; by default that of the trainer's collector.
        gradient_at: as of `DelayedGradient`.

    Example:
        >>> from hydra.utils import instantiate
        >>> instantiate(DelayedGradientConfig(lag=2))
        DelayedGradientHook(lag=2, gradient_at='behaviour')
    """

    lag: int | None = None
    gradient_at: str = "behaviour"

    _target_: str = "torchrl_hts.configs.make.DelayedGradientHook"
    _partial_: bool = False


@dataclass
class GymnasiumEnvConfig:
    """Configuration of ``gymnasium.make``: ``env=hts_gymnasium``.

    The environment stays a gymnasium one, for executors that never import torch; TorchRL's
    ``env=gym`` makes a TorchRL environment. Further keys go to the environment.

    Args:
        id: of the environment, as in ``gymnasium.make``.
        max_episode_steps: length at which an episode is truncated; by default the environment's.
        disable_env_checker: whether gymnasium checks the environment in its first steps; by default
            as gymnasium does.

    Example:
        >>> from hydra.utils import instantiate
        >>> instantiate(GymnasiumEnvConfig(id="CartPole-v1", max_episode_steps=9)).spec.id
        'CartPole-v1'
    """

    id: str = MISSING
    max_episode_steps: int | None = None
    disable_env_checker: bool | None = None

    _target_: str = "gymnasium.make"
    _partial_: bool = False
    _convert_: str = "all"  # environments know nothing of omegaconf's containers


@dataclass
class AtariEnvConfig:
    """Configuration of `torchrl_hts.envs.make_atari`: ``env=hts_atari``.

    The fields are the arguments of `make_atari`, with the same defaults.
    """

    env_id: str = "ALE/Pong-v5"
    frame_stack: int = 4
    noop_max: int = 30
    terminal_on_life_loss: bool = False
    fire_on_reset: bool = True
    sticky_actions: bool = False
    frame_skip: int = 4
    screen_size: int = 84
    render_mode: str | None = None

    _target_: str = "torchrl_hts.envs.make_atari"
    _partial_: bool = False


def _register() -> None:
    """Store the configurations.

    Those that take further keys are stored with ``struct`` off, which OmegaConf heeds for
    dataclasses too. The names of the environments are long because Hydra merges a user's file with
    whatever is stored under the same name.
    """
    store = ConfigStore.instance()
    store.store(group="hook", name="delayed_gradient", node=DelayedGradientConfig)
    store.store(group="env", name="hts_atari", node=AtariEnvConfig)
    for group, name, node in (
        ("collector", "hts", HTSCollectorConfig),
        ("env", "hts_gymnasium", GymnasiumEnvConfig),
    ):
        config = OmegaConf.structured(node, flags={"struct": False})
        store.store(group=group, name=name, node=config)


_register()
