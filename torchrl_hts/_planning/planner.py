"""Laying out the batches of one collector, as often as that is asked for."""

from __future__ import annotations

import pickle
from dataclasses import replace

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.info import InfoKey
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._planning.arguments import are_alike
from torchrl_hts._planning.batch_plan import BatchPlan, plan_batch
from torchrl_hts._planning.pass_times import PassJob
from torchrl_hts._policy.compiled import eagerly

__all__ = ["Planner"]


class Planner:
    """Lays out the batches of one collector.

    Args:
        policy: pickled, its tensors on the CPU.
        num_units: entries of ``create_env_fn`` whose rows are given bits together.
        on_cpu: whether the policy will run on the CPU.
        exploration_type, max_frames_per_traj, compact_obs, info_keys: see `plan_batch`.
    """

    def __init__(
        self,
        policy: bytes,
        num_units: int,
        *,
        on_cpu: bool,
        exploration_type: ExplorationType,
        max_frames_per_traj: int,
        compact_obs: bool,
        info_keys: tuple[InfoKey, ...] = (),
    ) -> None:
        self._policy = policy
        self._num_units = num_units
        self._on_cpu = on_cpu
        self._exploration_type = exploration_type
        self._max_frames_per_traj = max_frames_per_traj
        self._compact_obs = compact_obs
        self._info_keys = info_keys
        self._last: tuple[GymDescription | TorchRLDescription, int, BatchPlan] | None = None

    def plan(
        self, description: GymDescription | TorchRLDescription, num_envs: int | None = None
    ) -> BatchPlan:
        """See `plan_batch`; what was planned last is kept for environments that are alike.

        But not if that was done without observations, and now there are some.

        Args:
            description: of what one entry makes.
            num_envs: N; None: as if all entries made as many.
        """
        num_envs = num_envs or self._num_units * description.num_envs
        last, planned_for, _ = self._last or (None, 0, None)
        blind = last is not None and last.observations is None
        if (
            num_envs != planned_for
            or not are_alike(description, last)
            or (blind and description.observations is not None)
        ):
            planned = plan_batch(
                description,
                pickle.loads(self._policy),
                num_envs,
                exploration_type=self._exploration_type,
                max_frames_per_traj=self._max_frames_per_traj,
                compact_obs=self._compact_obs,
                info_keys=self._info_keys,
            )
            if not self._on_cpu:  # where a row that is refused may cost the device its sanity
                planned = replace(planned, trial=planned.trial.accepted_by(self._run))
            self._last = description, num_envs, planned
        assert self._last is not None
        return self._last[2]

    def _run(self, inputs: TensorDictBase) -> TensorDictBase:
        generator, kind = torch.random.fork_rng(devices=[]), self._exploration_type
        with generator, torch.no_grad(), set_exploration_type(kind), eagerly():
            written: TensorDictBase = pickle.loads(self._policy)(inputs.copy())
            return written

    def pass_job(self, description: GymDescription | TorchRLDescription) -> PassJob | None:
        """What it takes to time a pass of all environments; None if it can't be, or on no CPU."""
        if not self._on_cpu:
            return None
        try:
            count = self._num_units * description.num_envs
            examples = self.plan(description).examples[:count].clone()
        except Exception:  # which is met again, and told, when all environments are known
            return None
        return PassJob(self._policy, pickle.dumps(examples), self._exploration_type)
