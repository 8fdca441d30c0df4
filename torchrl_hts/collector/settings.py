"""What `HTSCollector` was asked for, as one record: its arguments, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType

from torchrl_hts._executor.factories import initialised
from torchrl_hts._executor.info import InfoKey, check_info_keys
from torchrl_hts._planning.arguments import (
    MAX_THREADS,
    check_callables,
    check_devices,
    check_frames,
    check_lag,
    check_max_frames,
    check_on_failure,
    check_seed,
    check_storage_dir,
    check_timeouts,
    find_factories,
    make_policy,
)
from torchrl_hts._planning.held_networks import warn_of_networks
from torchrl_hts._planning.lazy_policies import Example
from torchrl_hts._rounds.exchange import MAX_ENVS
from torchrl_hts._world.world import World
from torchrl_hts.collector.stock_arguments import Stock, take_stock_arguments
from torchrl_hts.errors.checks import check_flags, check_integer, check_seconds

__all__ = ["Settings"]

Factory = Callable[[], Any]


@dataclass(frozen=True)
class Settings:
    """The arguments of `HTSCollector`, under their names; those below come of several of them.

    Attributes:
        factories: of this learner's environments, each of one or of a batch of them.
        num_factories: of all learners together.
        is_alone: whether there is one factory, which stands in no list.
        names_device: whether batches say which device they are on.
        frames_per_batch: as it was asked for; see `Rounds`.
        total_frames: likewise; None: an endless run.
        stock: the arguments of TorchRL's collectors that mean something here.
    """

    factories: tuple[Factory, ...]
    num_factories: int
    is_alone: bool
    names_device: bool
    policy: TensorDictModuleBase
    frames_per_batch: int
    total_frames: int | None
    lag: int
    num_actors: int | None
    num_executors: int | None
    seed: int
    device: torch.device | None
    storing_device: torch.device
    policy_device: torch.device
    env_device: torch.device | None
    exploration_type: ExplorationType
    max_frames_per_traj: int
    postproc: Callable[[TensorDictBase], TensorDictBase] | None
    split_trajs: bool
    set_truncated: bool
    compact_obs: bool
    info_keys: tuple[InfoKey, ...]
    return_same_td: bool
    actor_threads: int
    on_executor_failure: str
    max_restarts: int
    restart_window_s: float
    timeout_s: Mapping[str, float]
    storage_dir: str | None
    timeline_events: int
    world: World | None
    pre_collect_hook: Callable[[], None] | None
    post_collect_hook: Callable[[TensorDictBase], None] | None
    stock: Stock

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """Check arguments and complete them. With several learners all have to call this.

        Args:
            arguments: all of `HTSCollector`'s by name, as its caller or a default gave them. What
                has another name is left alone.

        Raises:
            TypeError, ValueError: for arguments that don't fit each other; the message says which.
        """
        given = dict(arguments)
        stock = take_stock_arguments(given["stock_arguments"])
        kept = _of_the_right_kind(given)
        devices = ("device", "storing_device", "policy_device", "env_device")
        storing_device, policy_device, env_device = check_devices(*map(given.get, devices))
        plain, is_alone = find_factories(
            given["create_env_fn"], given["create_env_kwargs"], stock.copies
        )
        makers = (given["create_env_fn"], given["create_env_kwargs"])
        warn_of_networks(*makers, stacklevel=3)  # whoever makes the collector
        factories = _own(plain, given["world"], stock)
        if stock.replay_buffer is not None and kept["return_same_td"]:
            raise TypeError(
                "return_same_td=True hands out slots, and with a replay_buffer nothing is handed "
                "out: leave one of them out"
            )
        max_frames = check_max_frames(given["max_frames_per_traj"])
        seed = _seed_of_all(given["seed"], given["world"])
        lag = check_lag(given["lag"], len(factories))
        frames = check_frames(given["frames_per_batch"], given["total_frames"])
        return cls(
            factories=factories,
            num_factories=len(plain),
            is_alone=is_alone and given["world"] is None,
            names_device=storing_device is not None,
            frames_per_batch=frames[0],
            total_frames=frames[1],
            lag=lag,
            num_actors=_count(given, "num_actors", most=MAX_ENVS),
            num_executors=_count(given, "num_executors"),
            seed=seed,
            device=None if given["device"] is None else torch.device(given["device"]),
            storing_device=torch.device(storing_device or "cpu"),
            policy_device=torch.device(policy_device or "cpu"),
            env_device=None if env_device is None else torch.device(env_device),
            max_frames_per_traj=max_frames,
            info_keys=check_info_keys(given["info_keys"]),
            actor_threads=check_integer("actor_threads", given["actor_threads"], most=MAX_THREADS),
            on_executor_failure=check_on_failure(given["on_executor_failure"]),
            max_restarts=check_integer("max_restarts", given["max_restarts"]),
            restart_window_s=check_seconds("restart_window_s", given["restart_window_s"]),
            timeout_s=check_timeouts(given["timeout_s"]),
            storage_dir=check_storage_dir(given["storage_dir"]),
            timeline_events=check_integer("timeline_events", given["timeline_events"], least=0),
            policy=make_policy(
                given["policy"],
                given["policy_factory"],
                trust_policy=stock.trust_policy,
                example=Example(plain[0], max_frames, stock.auto_register_policy_transforms),
            ),
            stock=stock,
            **kept,
        )

    @property
    def first_entry(self) -> int:
        """The number of this learner's first factory among those of all learners."""
        return 0 if self.world is None else self.world.rank * len(self.factories)

    @property
    def group(self) -> int:
        """Factories whose environments are given bits together: of a shard, or this learner's."""
        if self.world is None or self.world.shards is None:
            return len(self.factories)
        return self.num_factories // self.world.shards


def _of_the_right_kind(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are kept as they are, if they are of the right kind, by name."""
    split_trajs = given["split_trajs"]
    flags = {"split_trajs": False if split_trajs is None else split_trajs}  # TorchRL's default
    flags |= {name: given[name] for name in ("set_truncated", "compact_obs", "return_same_td")}
    check_flags(**flags, track_policy_version=given["track_policy_version"])
    callables = {
        name: given[name] for name in ("postproc", "pre_collect_hook", "post_collect_hook")
    }
    check_callables(**callables)
    exploration_type, world = given["exploration_type"], given["world"]
    if not isinstance(exploration_type, ExplorationType):
        raise TypeError(f"exploration_type must be an ExplorationType, got {exploration_type!r}")
    if not isinstance(world, World | None):
        raise TypeError(f"world must be a World or None, got {world!r}")
    return {**flags, **callables, "exploration_type": exploration_type, "world": world}


def _own(factories: list[Factory], world: World | None, stock: Stock) -> tuple[Factory, ...]:
    """This learner's factories of those of all."""
    if stock.init_fn is not None:
        factories = initialised(factories, stock.init_fn)
    return tuple(factories if world is None else world.own(factories))


def _seed_of_all(given: Any, world: World | None) -> int:
    """The seed of this collector: where none is given, that of the first learner."""
    seed = check_seed(given)
    if world is None:
        return seed
    drawn: int = world.gather(seed)[0]  # on every rank, whatever it was given
    return drawn if given is None else seed


def _count(given: Mapping[str, Any], name: str, **bounds: int) -> int | None:
    """A number of processes; None where it is to be chosen."""
    return None if given[name] is None else check_integer(name, given[name], **bounds)
