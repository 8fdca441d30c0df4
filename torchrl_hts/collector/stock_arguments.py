"""The arguments of TorchRL's collectors: which of them mean something here, and what instead.

Every argument of every collector in TorchRL 0.14 is either one of `HTSCollector`'s own or in
`STOCK_ARGUMENTS`; docs/how_to/coming_from_torchrl.md shows the same as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchrl.collectors import Collector
from torchrl.data import ReplayBuffer

from torchrl_hts.errors.checks import check_integer

__all__ = ["STOCK_ARGUMENTS", "Stock", "StockArgument", "take_stock_arguments"]


@dataclass(frozen=True)
class StockArgument:
    """What becomes of an argument of TorchRL's collectors.

    Attributes:
        why: why other values are not taken, and what to do instead; or, where all are, why the
            argument makes no difference.
        harmless: values that ask for nothing, TorchRL's own default among them.
        any_value: whether every value is let pass without effect.
    """

    why: str
    harmless: tuple[Any, ...] = (None, False, 0, -1)
    any_value: bool = False


@dataclass(frozen=True)
class Stock:
    """Arguments of TorchRL's collectors that do mean something here.

    Attributes:
        cat_results: ``"stack"`` hands batches out as ``[N, T]``, 0 and -1 as ``[N * T]``; None:
            not given.
        copies: how many environments to make of a lone factory; None: one.
        init_fn: called in each executor before its environments are made.
        trust_policy: whether a callable maps TensorDicts to TensorDicts, whatever its signature.
        worker_idx: the index of this collector among others.
        auto_register_policy_transforms: whether TorchRL environments get what recurrent policies
            need.
        init_random_frames: for how many frames at first actions are random, of all environments.
        replay_buffer: is extended by each batch, instead of handing it out.
    """

    cat_results: int | str | None = None
    copies: int | None = None
    init_fn: Callable[[], Any] | None = None
    trust_policy: bool = False
    worker_idx: int | None = None
    auto_register_policy_transforms: bool = False
    init_random_frames: int = 0
    replay_buffer: ReplayBuffer | None = None


def _without_effect(why: str) -> StockArgument:
    return StockArgument(why, any_value=True)


_MACHINES = (
    "a collector's workers are processes of its own machine; on several machines start learners "
    "with torchrun, srun or Ray Train (World), or put environments into Ray actors "
    "(torchrl_hts.envs.make_remote)"
)
_TRAJECTORIES = (
    "a round is the same number of steps of every environment; use split_trajs=True, or assemble "
    "trajectories with postproc"
)
_WEIGHTS = (
    "the iterator stages the policy's values: leave it out, or use update_policy_weights_ for "
    "others"
)
_NO_SERVER = "actors run the policy, and how they share it is not for the user to choose"
_ACTORS = "the actors take whatever observations are ready; use num_actors"
_AS_WRITTEN = "leave it out: actors run a policy as it is written"

STOCK_ARGUMENTS: dict[str, StockArgument] = {
    # Without effect.
    "track_traj_ids": _without_effect("batches always carry the ids of trajectories"),
    "no_cuda_sync": _without_effect("a batch is complete when it is handed out"),
    "use_buffers": _without_effect("batches always lie in preallocated storage"),
    "extend_buffer": _without_effect("a replay_buffer is extended by each batch as a whole"),
    "update_at_each_batch": _without_effect(
        "every round acts with the values that are staged when the iterator is resumed"
    ),
    "update_after_each_batch": _without_effect(
        "every round acts with the values that are staged when the iterator is resumed"
    ),
    "sync": _without_effect(
        "batches are whole rounds of every environment, and with lag=1 the next is collected "
        "meanwhile; lag=0 is plain synchronous learning. Of [N, alpha] a replay buffer takes "
        "single steps by replay_buffer or cat_results=0"
    ),
    "use_env_creator": _without_effect("factories are sent as they are"),
    "policy_version": _without_effect("versions are the numbers of rounds, from 0 on"),
    # Refused, but for the values that ask for nothing.
    "reset_when_done": StockArgument(
        "episodes that have ended begin anew, or rows would be empty; use postproc to leave steps "
        "out",
        (None, True),
    ),
    "trajs_per_batch": StockArgument(_TRAJECTORIES),
    "trajs_per_write": StockArgument(_TRAJECTORIES),
    "traj_format": StockArgument(_TRAJECTORIES),
    "yield_completed_trajectories": StockArgument(_TRAJECTORIES),
    "reset_at_each_iter": StockArgument(
        "episodes go on from round to round; use max_frames_per_traj to cut them"
    ),
    "preemptive_threshold": StockArgument(
        "every environment contributes to every round in full", (None, 1)
    ),
    "interruptor": StockArgument("every round is complete"),
    "num_threads": StockArgument(
        "use actor_threads, and torch.set_num_threads for the learner", (None, 1)
    ),
    "num_sub_threads": StockArgument(
        "use actor_threads, and torch.set_num_threads for the learner", (None, 1)
    ),
    "weight_updater": StockArgument(_WEIGHTS),
    "weight_sync_schemes": StockArgument(_WEIGHTS),
    "weight_recv_schemes": StockArgument(_WEIGHTS),
    "weight_sync": StockArgument(_WEIGHTS),
    "weight_sync_model_id": StockArgument("there is one model, 'policy'", (None, "policy")),
    "max_weight_update_interval": StockArgument(_WEIGHTS, (None, -1, 0, 1)),
    "update_interval": StockArgument(_WEIGHTS, (None, -1, 0, 1)),
    "compile_policy": StockArgument(
        f"{_AS_WRITTEN}; a learner may run torch.compile(policy), which has the same parameters"
    ),
    "cudagraph_policy": StockArgument(f"{_AS_WRITTEN}; CUDA graphs are for the learner's update"),
    "policy_version_key": StockArgument(
        "the key is 'policy_version'; rename it with postproc, after which DelayedGradient can't "
        "check batches",
        (None, "policy_version"),
    ),
    "verbose": StockArgument("nothing is printed; use statistics() and timeline()"),
    "collector_class": StockArgument(
        "workers are executors and actors; use num_executors and num_actors",
        (None, Collector),
    ),
    "collector_kwargs": StockArgument(
        "there are no collectors inside; give them as arguments", (None, {})
    ),
    "num_workers_per_collector": StockArgument(
        "there are no collectors inside; give create_env_fn as a list", (None, 1)
    ),
    "backend": StockArgument(
        _MACHINES,
        (None, "direct", "process", "mp", "multiprocessing", "gloo"),
    ),
    "backend_options": StockArgument("give them as arguments of their own", (None, {})),
    "env_backend": StockArgument(
        "environments are stepped by executors, which are processes",
        (None, "process", "mp", "multiprocessing"),
    ),
    "policy_backend": StockArgument(
        "the policy is run by actors, which are processes",
        (None, "process", "mp", "multiprocessing"),
    ),
    "env_exchange": StockArgument("environments always share memory", (None, "auto", "shm")),
    "envs_per_worker": StockArgument("use num_executors", (None, 1)),
    "transition_chunk_size": StockArgument(
        "transitions are written into shared memory as they come", (None, "auto")
    ),
    "transport": StockArgument("environments and actors always share memory"),
    "max_batch_size": StockArgument(_ACTORS),
    "min_batch_size": StockArgument(_ACTORS),
    "server_timeout": StockArgument(f"{_ACTORS}, and timeout_s to find workers that hang"),
    "server_config": StockArgument(_NO_SERVER, (None, {})),
    "device_config": StockArgument(
        "use device, storing_device, policy_device and env_device", (None, {})
    ),
    "worker_affinity": StockArgument("start Python with taskset, whose cores all workers inherit"),
    "driver_affinity": StockArgument("call os.sched_setaffinity once the collector is made"),
    "visible_devices": StockArgument("use policy_device and env_device"),
    "slurm_kwargs": StockArgument(_MACHINES, (None, {})),
    "launcher": StockArgument(_MACHINES, (None, "mp", "submitit")),
    "tcp_port": StockArgument(_MACHINES),
    "tensorpipe_options": StockArgument(_MACHINES, (None, {})),
    "ray_init_config": StockArgument(_MACHINES, (None, {})),
    "remote_configs": StockArgument(_MACHINES, (None, {})),
}


def take_stock_arguments(given: Mapping[str, Any]) -> Stock:
    """Take those that mean something, refuse those that can't be honoured, and unknown ones.

    Raises:
        TypeError, ValueError: for those that are refused; the message says what to use instead.
    """
    taken = dict(given)
    asked_for = {name: taken.pop(name) for name in given if name in STOCK_ARGUMENTS}
    refused = [name for name, value in asked_for.items() if not _is_harmless(name, value)]
    if refused:
        why = "; nor ".join(f"{name}: {STOCK_ARGUMENTS[name].why}" for name in refused)
        raise TypeError(f"HTSCollector does not take {why}")
    copies = [taken.pop(name, None) for name in ("num_workers", "num_collectors")]
    known = Stock.__dataclass_fields__.keys() - {"copies"}
    unknown = [name for name in taken if name not in known]
    if unknown:
        raise TypeError(f"HTSCollector got an unexpected keyword argument {unknown[0]!r}")
    found = {name: value for name, value in taken.items() if value is not None}
    _check_taken(found)
    return Stock(copies=_copies(*copies), **found)


def _is_harmless(name: str, value: Any) -> bool:
    argument = STOCK_ARGUMENTS[name]
    plain = isinstance(value, int | float | str | dict | type | None)  # others may not compare
    return argument.any_value or (plain and any(value == fine for fine in argument.harmless))


def _check_taken(found: dict[str, Any]) -> None:
    """Check them, and make plain ints of numbers."""
    cat_results = found.get("cat_results", "stack")
    known = isinstance(cat_results, str | int) and not isinstance(cat_results, bool)
    if not known or cat_results not in ("stack", 0, -1):
        raise ValueError(f"cat_results must be 'stack', 0 or -1, got {cat_results!r}")
    for name in ("trust_policy", "auto_register_policy_transforms"):
        if not isinstance(found.get(name, False), bool):
            raise TypeError(f"{name} must be True, False or None, got {found[name]!r}")
    if not callable(found.get("init_fn", print)):
        raise TypeError(f"init_fn must be callable, got {found['init_fn']!r}")
    if "init_random_frames" in found:
        frames = check_integer("init_random_frames", found["init_random_frames"], least=-1)
        found["init_random_frames"] = max(0, frames)
    buffer = found.get("replay_buffer")
    if buffer is not None and not isinstance(buffer, ReplayBuffer):
        raise TypeError(
            f"replay_buffer must be a torchrl.data.ReplayBuffer, got a {type(buffer).__name__}"
        )
    if "worker_idx" in found:
        found["worker_idx"] = check_integer("worker_idx", found["worker_idx"], least=0)


def _copies(num_workers: Any, num_collectors: Any) -> int | None:
    """How many environments to make of one factory."""
    given = {"num_workers": num_workers, "num_collectors": num_collectors}
    checked = [check_integer(name, n) for name, n in given.items() if n is not None]
    if len({*checked}) > 1:
        raise ValueError(
            f"num_workers={num_workers} and num_collectors={num_collectors}: both say how many "
            "environments to make of create_env_fn; give one of them"
        )
    return checked[0] if checked else None
