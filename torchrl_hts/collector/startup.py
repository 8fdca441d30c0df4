"""From the settings of a collector to workers that are ready for its first round."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Any, TypeVar

from torchrl_hts._actor.messages import ActorJob
from torchrl_hts._executor.factories import with_transforms
from torchrl_hts._learner.learner import LearnerSide
from torchrl_hts._learner.weights import WeightSource
from torchrl_hts._planning.arguments import check_equal
from torchrl_hts._planning.batch_plan import BatchPlan
from torchrl_hts._planning.exploration_specs import give_specs
from torchrl_hts._planning.fitted import Fitted
from torchrl_hts._planning.pickling import pickle_factories, pickle_policy
from torchrl_hts._planning.planner import Planner
from torchrl_hts._planning.policy_forms import transforms_of
from torchrl_hts._planning.random_actions import RandomActions, reads_masks
from torchrl_hts._planning.torch_defaults import torchs_defaults
from torchrl_hts._planning.worker_counts import Tryout, choose_team
from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._processes.limits import available_cores, check_descriptors
from torchrl_hts._processes.server_pool import Servers
from torchrl_hts._rounds.event_rings import recorder
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.shared_memory import Layout
from torchrl_hts._rounds.slots import Slots, field_of, policy_tensors
from torchrl_hts._supervision.making import Description, make_environments, observe_first
from torchrl_hts._supervision.restarts import Restarts
from torchrl_hts._supervision.supervisor import Supervisor
from torchrl_hts._supervision.workers import EnvironmentSource, Workers
from torchrl_hts._world.digest import digest
from torchrl_hts.collector.replay_buffers import check_buffer
from torchrl_hts.collector.rounds import Rounds
from torchrl_hts.collector.settings import Settings
from torchrl_hts.errors import PolicyError

__all__ = ["Started", "Startup"]

# How long an environment or the policy may be tried out, its making included.
_TRYOUT_LIMIT_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class Started:
    """What a collector has when its workers are ready.

    Attributes:
        supervisor: that sets them to work.
        learner: the learner's side of the schedule.
        rounds: what they are like.
        truncated_keys: ``("next", ...)`` keys of the truncation flags.
        invariant_sizes: batch sizes that all actors agree on.
        cat_results: what batches are like: ``"stack"``, or 0 and -1 for flat ones. By default that
            of a single environment, given as such in no list and no batch, is flat.
        spaces: what the environments' spaces are, in words, by name. Within their wrappers they may
            differ from each other; those that do aren't there.
    """

    supervisor: Supervisor
    learner: LearnerSide
    rounds: Rounds
    truncated_keys: tuple[Key, ...]
    invariant_sizes: InvariantSizes
    cat_results: int | str
    spaces: Mapping[str, str]


class Startup:
    """Gets a collector's workers ready: the constructor chooses how many, `run` starts them.

    In between, somebody has to see to it that they are shut down in the end.

    Args:
        settings: of the collector.
        weights: of its policy.

    Attributes:
        workers: none of which has been started before `run`.
        num_executors, num_actors: how many there are to be.

    Raises:
        TypeError: for what can't be pickled.
        ResourceError: if there are too few file descriptors or processes.
    """

    @torchs_defaults()
    def __init__(self, settings: Settings, weights: WeightSource) -> None:
        self._settings, self._weights = settings, weights
        world = settings.world
        self._cores = available_cores() if world is None else world.cores
        policy = pickle_policy(settings.policy)
        servers = Servers()
        try:
            factories = settings.factories
            if settings.stock.auto_register_policy_transforms:
                factories = tuple(with_transforms(factories, transforms_of(settings.policy)))
            env_device = None if settings.env_device is None else str(settings.env_device)
            self._policy, self._planner = policy, self._planner_of(policy)
            pickled = pickle_factories(factories, settings.first_entry)
            # Before the first of them: a server that lacks some says less.
            check_descriptors(
                min(len(factories), settings.num_executors or 1), settings.num_actors or 1
            )
            servers.begin(pickled)
            self._tryout = Tryout(
                servers,
                pickled,
                {"max_frames_per_traj": settings.max_frames_per_traj, "device": env_device},
                self._planner.pass_job,
                min(_TRYOUT_LIMIT_S, settings.timeout_s.get("executor", inf)),
            )
            team, self._tried = choose_team(
                self._tryout,
                settings.num_executors,
                settings.num_actors,
                settings.actor_threads,
                ceil(self._cores),
            )
            self.num_executors, self.num_actors = team.executors, team.actors
            self.workers = Workers(
                EnvironmentSource(
                    self._tryout.factories,
                    self._tryout.env_options,
                    settings.seed,
                    settings.first_entry,
                ),
                team.executors,
                team.actors,
                servers,
                timeouts_s=settings.timeout_s,
                storage_dir=settings.storage_dir,
            )
        except BaseException:
            servers.release()
            raise

    @torchs_defaults()
    def run(self) -> Started:
        """Make the environments, lay slots out for what they and the policy give, and calibrate.

        Raises:
            TypeError, ValueError: if environments and arguments don't fit each other.
            PolicyError: if the policy's rows can't be made independent of their batch-mates.
            ResourceError: if there is too little memory.
            WorkerError: if a worker fails.
            WorldError: if learners don't collect for the same run.
        """
        settings, workers, world = self._settings, self.workers, self._settings.world
        known = None if self._tried is None else self._tried.observations
        descriptions = make_environments(workers, known)
        check_equal(descriptions, settings.first_entry)
        sizes_made = [description.num_envs for description in descriptions]
        rounds = Rounds.of(
            settings.frames_per_batch,
            settings.total_frames,
            sizes_made,
            num_learners=1 if world is None else world.size,
            num_parts=1 if world is None else world.num_parts,
            stacklevel=3,  # whoever makes the collector
        )
        cat_results = self._cat_results(descriptions[0], rounds)
        plan, description = self._plan(descriptions[0], rounds.num_own)
        at_random = self._at_random(description, plan, rounds)
        self._check_truncation(plan)
        layout = self._layout(plan, rounds)
        a_core_each = self.num_executors + self.num_actors * settings.actor_threads <= self._cores
        cores_to_fill = ceil(self._cores) if self.num_actors == 1 else None
        shared = workers.share(layout, rounds.num_rounds, plan.options, cores_to_fill, a_core_each)
        slots = Slots(shared.memory)
        generic = self._weights.generic()  # to calibrate with
        for slot in range(layout.num_slots):
            slots.write_parameters(slot, generic)
        sizes = workers.start_actors(
            ActorJob(
                policy=self._policy,
                layout=layout,
                last_round=rounds.num_rounds,
                worker=0,
                examples=pickle.dumps(plan.trial),
                outputs=plan.outputs,
                exploration_type=settings.exploration_type,
                device=str(settings.policy_device),
                num_threads=settings.actor_threads,
                owner=workers.owner,
                cores=cores_to_fill,
                a_core_each=a_core_each,
                **at_random,
            )
        )
        self._agree(sizes, rounds)
        restarts = Restarts(self._replaces, settings.max_restarts, settings.restart_window_s)
        supervisor = Supervisor(workers, restarts, plan.truncated_keys)
        learner = LearnerSide(
            supervisor,
            shared.schedule,
            slots,
            self._weights,
            settings.seed,
            recorder(shared.memory, layout.num_workers),
            layout.first_env,
            rounds.units,
        )
        spaces = _common_texts(descriptions)
        return Started(supervisor, learner, rounds, plan.truncated_keys, sizes, cat_results, spaces)

    @property
    def _replaces(self) -> bool:
        """Whether workers that fail are replaced."""
        return self._settings.on_executor_failure == "restart"

    def _cat_results(self, description: Description, rounds: Rounds) -> int | str:
        """See `Started`; a replay buffer has to fit."""
        settings = self._settings
        cat_results = settings.stock.cat_results
        if cat_results is None:
            cat_results = 0 if settings.is_alone and not description.is_batch else "stack"
        is_flat = cat_results != "stack"
        check_buffer(
            settings.stock.replay_buffer,
            rounds.num_own,
            is_flat=is_flat,
            splits=settings.split_trajs,
        )
        return cat_results

    def _planner_of(self, policy: bytes) -> Planner:
        """The planner of batches with a pickled policy."""
        settings = self._settings
        return Planner(
            policy,
            settings.group,
            on_cpu=settings.policy_device.type == "cpu",
            exploration_type=settings.exploration_type,
            max_frames_per_traj=settings.max_frames_per_traj,
            compact_obs=settings.compact_obs,
            info_keys=settings.info_keys,
        )

    def _plan(self, description: Description, num_envs: int) -> tuple[BatchPlan, Description]:
        """The layout of batches; a policy that needs the environment for it is fitted to it.

        Returns:
            Beside it the description of environment 0, with observations if they were needed.
        """
        policy = self._settings.policy
        changed = give_specs(policy, description)
        if isinstance(policy, Fitted):
            _, description = self._observing(policy.fit, description)
            changed = True
        if changed:
            self._policy = pickle_policy(policy)
            self._planner = self._planner_of(self._policy)
        return self._observing(partial(self._planner.plan, num_envs=num_envs), description)

    def _at_random(
        self, description: Description, plan: BatchPlan, rounds: Rounds
    ) -> dict[str, Any]:
        """What acts in the first rounds, and how many these are, as `ActorJob` has it."""
        frames = self._settings.stock.init_random_frames
        if not frames:
            return {}
        advice = f"leave init_random_frames={frames} out"
        if reads_masks(self._settings.policy):
            raise TypeError(f"random actions would ignore the mask that the policy reads: {advice}")
        at_random = RandomActions(advice=advice)
        self._observing(at_random.fit, description)
        at_random.write_as(plan.fields)
        return {
            "random_policy": pickle_policy(at_random),
            "random_rounds": rounds.that_hold(frames),
        }

    def _observing(
        self, use: Callable[[Description], T], description: Description
    ) -> tuple[T, Description]:
        """What `use` makes of environment 0, which is observed if the policy needs that."""
        try:
            return use(description), description
        except PolicyError:
            if description.observations is not None:
                raise
        description = observe_first(self.workers, description)
        return use(description), description

    def _check_truncation(self, plan: BatchPlan) -> None:
        """Raise ValueError if something is to be marked as truncated and there is no such mark."""
        asked_for = {
            "set_truncated=True": self._settings.set_truncated,
            "on_executor_failure='restart'": self._replaces,
        }
        for argument, asked in asked_for.items():
            if asked and not plan.truncated_keys:
                raise ValueError(
                    f"{argument} needs a 'truncated' key in the environment; add one with "
                    "env.add_truncated_keys()"
                )

    def _layout(self, plan: BatchPlan, rounds: Rounds) -> Layout:
        settings, world = self._settings, self._settings.world
        return Layout(
            rounds.num_own,
            rounds.sync_interval,
            settings.lag,
            self.num_executors + self.num_actors,
            plan.fields,
            tuple(field_of((n,), t, 0) for n, t in policy_tensors(settings.policy)),
            settings.timeline_events,
            0 if world is None else world.rank * rounds.num_own,
            rounds.num_envs,
            0 if world is None or world.shards is None else rounds.num_envs // world.shards,
            rounds.units,
            plan.groups,
        )

    def _agree(self, sizes: InvariantSizes, rounds: Rounds) -> None:
        """Raise WorldError unless all learners collect for the same run."""
        settings = self._settings
        if settings.world is not None:
            settings.world.agree(
                num_envs=rounds.num_envs,
                frames_per_batch=rounds.frames_per_batch,
                total_frames=settings.total_frames,
                lag=settings.lag,
                seed=settings.seed,
                exploration_type=settings.exploration_type,
                max_frames_per_traj=settings.max_frames_per_traj,
                init_random_frames=settings.stock.init_random_frames,
                policy=digest(value for _, value in policy_tensors(settings.policy)),
                calibration=sizes,
            )


def _common_texts(descriptions: Sequence[Description]) -> dict[str, str]:
    """What all environments say of their spaces alike."""
    return {
        name: text
        for name, text in descriptions[0].texts.items()
        if all(each.texts.get(name) == text for each in descriptions)
    }
