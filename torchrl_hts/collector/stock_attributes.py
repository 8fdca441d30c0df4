"""What scripts read of TorchRL's collectors, beyond iterating: there, or a sentence says why not.

Every public attribute of TorchRL 0.14's collectors is in `HTSCollector` or in `ABSENT`, and so are
those of environments that are looked for on a collector.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

__all__ = ["ABSENT", "StockAttributes"]

_ELSEWHERE = (
    "environments are in the processes that step them; make one for yourself with the factory that "
    "you gave as create_env_fn"
)
_SPEC = (
    "environments are in other processes: make one with your create_env_fn; for SACTrainer or "
    "CQLTrainer give the loss action_spec=, or a number as target_entropy"
)
_BATCH = "take a batch, and batch.clone().zero_() has its layout"
_NO_COLLECTORS = (
    "workers are executors and actors; worker_pids() names them, and statistics() tells of them"
)
_WEIGHTS = "use update_policy_weights_, and policy.state_dict() for the newest values"
_COUNTS = "use num_envs, sync_interval and frames_per_batch"
_SERVER = "the policy is run by actors; statistics() tells of them"
_TRAJECTORIES = "a round is the same number of steps of every environment"

ABSENT: dict[str, str] = {
    "env": _ELSEWHERE,
    "action_spec": _ELSEWHERE,
    "observation_spec": _ELSEWHERE,
    "getattr_env": _SPEC,
    "create_env_fn": "it has been sent to the executors; keep your own",
    "create_env_kwargs": "they have been sent to the executors; keep your own",
    "fake_tensordict": _BATCH,
    "local_init_rb": "the replay buffer is the one that was given, in this process",
    "running": "use is_running()",
    "buffers": _BATCH,
    "out_buffer": _BATCH,
    "out_tensordicts": _BATCH,
    "pipes": _NO_COLLECTORS,
    "procs": _NO_COLLECTORS,
    "queue_out": _NO_COLLECTORS,
    "collector_class": _NO_COLLECTORS,
    "get_cached_weights": _WEIGHTS,
    "get_weights_fn": _WEIGHTS,
    "policy_weights": _WEIGHTS,
    "policy_factory": "it has been called; the attribute policy is what it made",
    "batch_size": _COUNTS,
    "frames_per_batch_worker": _COUNTS,
    "frames_per_worker": _COUNTS,
    "policy_version_tracker": "use policy_version",
    "interruptor": "every round is complete",
    "preemptive_threshold": "every round is complete",
    "reset_at_each_iter": "episodes go on from round to round",
    "no_cuda_sync": "a batch is complete when it is handed out",
    "num_threads": "use actor_threads of the constructor",
    "num_sub_threads": "use actor_threads of the constructor",
    "server_backend": _SERVER,
    "server_stats": _SERVER,
    "yield_completed_trajectories": _TRAJECTORIES,
    "compiled_policy_kwargs": "the policy is run as it was given",
    "cudagraphed_policy_kwargs": "the policy is run as it was given",
}


class StockAttributes:
    """Attributes and methods that other collectors of TorchRL have, in terms of `HTSCollector`."""

    replay_buffer: Any
    extend_buffer = True
    reset_when_done = True
    update_at_each_batch = True
    track_traj_ids = True
    trust_policy = True
    compiled_policy = False
    cudagraphed_policy = False

    def __getattr__(self, name: str) -> Any:
        said = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{said}: {ABSENT[name]}" if name in ABSENT else said)

    @property
    def closed(self) -> bool:
        """Whether the workers have been shut down."""
        return bool(self._workers.is_closed())

    @property
    def n_env(self) -> int:
        """How many environments there are."""
        return int(self.num_envs)

    @property
    def num_workers(self) -> int:
        """How many environments there are: TorchRL's multi-process collectors count so."""
        return int(self.num_envs)

    def is_running(self) -> bool:
        """Whether batches are collected without anybody who asks for them: never."""
        return False

    def get_policy_version(self) -> int:
        """The attribute ``policy_version``, for callers that can only call methods."""
        version: int = self.policy_version
        return version

    def increment_version(self) -> None:
        """Nothing: the version of a batch is the number of its round."""

    def get_model(self, model_id: str = "policy") -> Any:
        """The policy, the only model.

        Raises:
            KeyError: for another model.
        """
        if model_id != "policy":
            raise KeyError(f"HTSCollector has one model, 'policy'; got model_id={model_id!r}")
        return self.policy

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy."""
        return getattr(self.policy, attr)

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer.

        Raises:
            AttributeError: if there is none, or it has no such attribute.
        """
        if self.replay_buffer is None:
            raise AttributeError(
                f"no {attr!r} of a replay buffer: the collector was made without replay_buffer"
            )
        return getattr(self.replay_buffer, attr)

    def pause(self) -> None:
        """Not offered: who wants a pause doesn't ask for the next batch.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "HTSCollector has no pause(): it collects no further than the rounds that are open, "
            "and waits there until you ask for the next batch"
        )

    def rollout(self) -> TensorDictBase | None:
        """The next batch, as ``next()`` gives it; None at the end."""
        batch: TensorDictBase | None = self.next()
        return batch

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Let every environment begin a new episode; what was collected ahead is dropped.

        Raises:
            TypeError: for a choice of environments, or arguments of their ``reset``.
            RuntimeError: after `shutdown`.
        """
        if index is not None or kwargs:
            raise TypeError(
                "reset takes no arguments here: all environments are reset together, each with a "
                "seed that depends on the collector's, the environment and the round"
            )
        self._learner.begin_anew()
