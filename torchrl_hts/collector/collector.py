"""`HTSCollector`: from arguments to batches.

Axes: N environments, T = alpha steps of a round.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import inf
from os import PathLike
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.collectors.utils import split_trajectories
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from torchrl_hts._learner.saved_state import own_state, saved_sizes
from torchrl_hts._learner.weights import WeightSource, tensors_in
from torchrl_hts._planning.arguments import Device
from torchrl_hts._processes.uncopied import Uncopied
from torchrl_hts._reports.statistics import Statistics, summarise
from torchrl_hts._reports.timeline import Timeline, check_path, read_timeline
from torchrl_hts._rounds.slots import policy_tensors
from torchrl_hts._world.digest import digest
from torchrl_hts._world.world import World
from torchrl_hts.collector.replay_buffers import extend
from torchrl_hts.collector.settings import Settings
from torchrl_hts.collector.startup import Started, Startup
from torchrl_hts.collector.stock_attributes import StockAttributes
from torchrl_hts.collector.weight_forms import the_weights
from torchrl_hts.delayed_gradient.undelayed import UpdateWatch, refuse_within_block
from torchrl_hts.errors import WorldError
from torchrl_hts.errors.checks import check_flags, check_integer, check_number

__all__ = ["HTSCollector"]


class HTSCollector(Uncopied, StockAttributes, BaseCollector):  # type: ignore[misc]  # torchrl has no types
    """Collects rounds of on-policy data while the learner learns from the round before.

    Executors step the environments, actors answer whatever observations are ready with one batched
    forward pass. Nobody waits for anybody except at a round's opening: round r opens when
    update r - (lag + 1) is done. For a given seed every batch D_j and every parameter theta_j is
    bit for bit the same, whatever the numbers of executors and actors, and whatever the timing
    (docs/explanation/determinism.md; Liu et al., NeurIPS 2020).

    A batch is a TensorDict ``[N, alpha]`` with names ``(None, "time")`` in the layout of TorchRL's
    own collectors. Of one environment that is given in no list it is ``[alpha]``. Its
    ``"policy_version"`` (int64 of that shape) is the round j, whose parameters theta_j took every
    action of the batch.

    Resuming the iterator says that the update with the last batch is done: it stages the newest
    values of the policy and opens the next round. `update_policy_weights_` stages others.
    With a lag, an update belongs inside a `DelayedGradient` of the same lag;
    `UndelayedUpdateWarning` tells of one that is not, and a ValueError of another lag.

    Args:
        create_env_fn: a callable per environment. Each returns a `gymnasium.Env` (the fast path:
            its executor never imports torch) or a TorchRL `EnvBase`, with any transforms. Or it
            returns a batch of environments that steps as one, a gymnasium ``VectorEnv`` or an
            `EnvBase` with ``batch_size=[k]`` (docs/how_to/batches_of_environments.md). A single
            callable is called once, or `num_workers` times. An `EnvBase` itself is copied.
        policy: a TensorDictModule that writes ``"action"``, in training or evaluation mode as it
            is. Or a plain module that maps the only observation to the action. Or a callable of
            either kind that uses no modules. By default, and with a ``RandomPolicy``, random. What
            is learned must be its parameters and buffers: of nothing else do actors get new values.
        policy_factory: makes the policy instead.

    Keyword Args:
        frames_per_batch: steps in a batch, N * alpha. It is rounded up to a multiple of N with a
            warning, as TorchRL does. A float without a fraction does too.
        total_frames: the iterator ends after at least so many steps; -1: never. A float without a
            fraction does too.
        lag: how many updates the behaviour parameters are behind. 1 is the paper; 0 is synchronous.
        num_actors: processes that run the policy. By default as many as keep up with the executors
            on the cores that these leave, by the same measurement as `num_executors`. There is one
            with one or two cores, for a policy that is not on the CPU or can't be timed, and where
            `num_executors` is given. A lone actor waits for larger batches while every core has
            other work. The attribute `num_actors` tells how many there are.
        num_executors: processes that step environments, at most one per environment. By default one
            more environment is made in a process of its own, played at random, and closed. If its
            steps compute, there is one executor per core, but for the cores that the policy takes
            on the CPU. If they wait, there is up to one per environment, but a single one for many
            environments of `make_remote`. If they take microseconds, there are few. The attribute
            `num_executors` tells how many there are.
        seed: of everything random, an int >= 0. By default it is drawn from torch's generator.
        device: default of the three devices that follow. By default they are the CPU.
        storing_device: where batches are handed out. Their ``device`` is None where none is given.
        policy_device: where the actors run the policy.
        env_device: where TorchRL environments compute.
        create_env_kwargs: keyword arguments of every factory, or a list with one dict for each.
        exploration_type: under which the actors run the policy.
        max_frames_per_traj: length in steps at which an episode is truncated; 0 or -1: never.
            Batches then have ``step_count``.
        postproc: applied to each batch before it is handed out.
        split_trajs: whether batches are handed out as ``[trajectories, time]``, padded, with
            ``("collector", "mask")``.
        set_truncated: whether the last step of every row is marked as truncated. `EpisodeReturns`
            needs to be told.
        compact_obs: whether ``("next", observation)`` is left out.
        info_keys: numbers in the ``info`` of a gymnasium environment's steps that batches carry
            too, such as ``["is_success", ("episode", "r")]``. They are ``("next", "is_success")``
            and ``("next", "episode", "r")``, float64 ``[N, T, 1]``, NaN where a step has none
            (docs/how_to/carry_info.md).
        return_same_td: whether the slot itself is handed out instead of a copy. It is valid until
            the iterator is resumed.
        track_policy_version: accepted for compatibility. Batches always carry the version.
        actor_threads: torch's intra-op threads in each actor. A small policy is run by one.
        on_executor_failure: what is done about an executor that dies, hangs, or whose environment
            raises. ``"raise"`` raises a WorkerError. ``"restart"`` replaces the executor and resets
            its environments, with a warning (docs/explanation/reliability.md). Actors that die or
            hang are then replaced too, without effect on any result. A policy that raises is never
            tried again.
        max_restarts: how many workers are replaced within `restart_window_s`. The failure that
            follows is raised.
        restart_window_s: length of that window, in seconds.
        timeout_s: for how many seconds a worker that has work may make no progress before it counts
            as hung, while environments are made too. A number, or a dict with ``"executor"`` and
            ``"actor"``. Off by default.
        storage_dir: a directory for rounds that don't fit into memory. They lie in a file there
            which has no name and so never stays behind.
        timeline_events: how many of the newest events of each worker are kept for `timeline`, in 32
            bytes each. With 0 `timeline` has nothing to show.
        world: the learners of this run, if there are several or the batch has shards. Every learner
            lists all environments and gets its share of them. `frames_per_batch` and `total_frames`
            are those of all learners, and a batch has this learner's rows. Workers share the
            machine's cores. Seeds, noise and trajectory ids go by an environment's number among
            all (docs/how_to/many_learners.md).
        pre_collect_hook: called before each batch is waited for.
        post_collect_hook: called with each batch.
        stock_arguments: those of TorchRL's own collectors. Some are taken (``replay_buffer``,
            ``init_random_frames``, ``cat_results``, ``num_workers``, ``init_fn``, ...). Some make
            no difference here, and the others are refused by an error that says what to use
            instead: docs/how_to/coming_from_torchrl.md.

    Raises:
        TypeError, ValueError: for arguments that don't fit each other; the message says which.
        PolicyError: if the policy's rows can't be made independent of their batch-mates.
        ResourceError: if there is too little memory, or too few file descriptors or processes.
        WorkerError: if an environment can't be made; later, from the iterator, if a worker fails.
        WorldError: if the learners' options, policies or calibrations differ; later, from the
            iterator, if their policies differ after 1, 2, 4, 8, ... updates, or the last one.

    Example:
        >>> import functools, gymnasium as gym
        >>> from tensordict.nn import ProbabilisticTensorDictModule as Prob, TensorDictModule
        >>> from tensordict.nn import ProbabilisticTensorDictSequential as Actor
        >>> policy = Actor(
        ...     TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        ...     Prob(["logits"], ["action"], distribution_class=torch.distributions.Categorical),
        ... )
        >>> make_env = functools.partial(gym.make, "CartPole-v1")
        >>> with HTSCollector([make_env] * 2, policy, frames_per_batch=8, total_frames=16) as data:
        ...     for batch in data:
        ...         print(batch.shape, batch["policy_version"].unique().item())
        torch.Size([2, 4]) 0
        torch.Size([2, 4]) 1
    """

    def __init__(
        self,
        create_env_fn: Callable[..., Any] | EnvBase | Sequence[Callable[..., Any] | EnvBase],
        policy: nn.Module | Callable[..., Any] | None = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int,
        total_frames: int | float = -1,
        lag: int = 1,
        num_actors: int | None = None,
        num_executors: int | None = None,
        seed: int | None = None,
        device: Device = None,
        storing_device: Device = None,
        policy_device: Device = None,
        env_device: Device = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        max_frames_per_traj: int | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = False,
        set_truncated: bool = False,
        compact_obs: bool = False,
        info_keys: Sequence[str | Sequence[str]] | None = None,
        return_same_td: bool = False,
        track_policy_version: bool = True,
        actor_threads: int = 1,
        on_executor_failure: str = "raise",
        max_restarts: int = 10,
        restart_window_s: float = 600.0,
        timeout_s: float | Mapping[str, float] | None = None,
        storage_dir: str | PathLike[str] | None = None,
        timeline_events: int = 0,
        world: World | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
        **stock_arguments: Any,
    ) -> None:
        settings = Settings.of(locals())
        super().__init__()
        self._show(settings)
        self._frames = self._collected = 0  # the latter without those of a loaded state
        self._iter = -1
        self._weights = WeightSource(settings.policy)
        self._updates = self._watch()
        startup = Startup(settings, self._weights)
        self._workers = startup.workers
        self._finalizer = weakref.finalize(self, self._workers.shutdown)
        self.num_executors, self.num_actors = startup.num_executors, startup.num_actors
        try:
            started = startup.run()
        except BaseException:
            self.shutdown(timeout=1.0)  # for environments that are there to be closed
            raise
        self._show_rounds(started)
        self._supervisor, self._learner = started.supervisor, started.learner
        self._memory, self._invariant_sizes = started.supervisor.memory, started.invariant_sizes
        self._truncated_keys = started.truncated_keys if self.set_truncated else ()

    def _watch(self) -> UpdateWatch:
        learns_here = self.worker_idx is None  # not if it is one of several collectors
        # Random actions at first, and a buffer: nobody learns from steps of theta_j alone.
        off_policy = self.replay_buffer is not None or self.init_random_frames > 0
        return UpdateWatch(self.policy, self.lag, learns_here=learns_here, off_policy=off_policy)

    def _show(self, settings: Settings) -> None:
        """Set the attributes that scripts, and TorchRL's trainers, read."""
        self.pre_collect_hook = settings.pre_collect_hook
        self.post_collect_hook = settings.post_collect_hook
        self.total_frames: Any = inf if settings.total_frames is None else settings.total_frames
        self.lag = settings.lag
        self.policy = settings.policy
        self.exploration_type = settings.exploration_type
        self.max_frames_per_traj = settings.max_frames_per_traj
        self.set_truncated, self.compact_obs = settings.set_truncated, settings.compact_obs
        self.postproc, self.split_trajs = settings.postproc, settings.split_trajs
        self.return_same_td = settings.return_same_td
        self.worker_idx = settings.stock.worker_idx
        self.init_random_frames = settings.stock.init_random_frames
        self.replay_buffer = settings.stock.replay_buffer
        self.device, self.storing_device = settings.device, settings.storing_device
        self.policy_device, self.env_device = settings.policy_device, settings.env_device
        self._names_device = settings.names_device
        self.world = settings.world
        self._num_learners = 1 if self.world is None else self.world.size

    def _show_rounds(self, started: Started) -> None:
        """Set those that tell of the environments."""
        self._spaces, rounds = started.spaces, started.rounds
        self.cat_results: int | str = started.cat_results
        self.num_envs, self.sync_interval = rounds.num_envs, rounds.sync_interval
        self.frames_per_batch = self.requested_frames_per_batch = rounds.frames_per_batch
        self._last_round = rounds.num_rounds

    def _agree_on_an_update(self) -> None:
        """Raise WorldError if learners have taken updates apart from each other.

        Asked after 1, 2, 4, 8, ... updates and the last one, since it reads all parameters.
        """
        updates = self._iter + 1
        is_last = self._frames >= self.total_frames
        if self.world is not None and (updates & self._iter == 0 or is_last):
            try:
                tensors = [*self.policy.parameters(), *self.policy.buffers()]
                self.world.agree(policy=digest(tensors))
            except WorldError as error:
                raise WorldError(
                    f"after {updates:,} updates the learners have different policies: {error}. "
                    "Take gradients in a loop over World.gradients, give RunningNorm.update the "
                    "world, and change parameters by nothing that one learner alone knows"
                ) from error

    # The iterator: the learner's side of the schedule.

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield D_0, D_1, ...; resuming says that the update with the last batch is done.

        With a `replay_buffer` it yields None, when a batch has been put there.

        Dropping an iterator half-way loses nothing: the next one goes on with the next batch.
        When all frames have been collected the workers are shut down.

        Raises:
            RuntimeError: after `shutdown`, where frames are left.
            WorkerError: if a worker fails.
        """
        while self._frames < self.total_frames:
            if self.pre_collect_hook is not None:
                self.pre_collect_hook()
            round_, slot = self._learner.next_round()
            if self.world is not None:
                self.world._begin_round(round_)
            self._frames += self.frames_per_batch
            self._collected += self.frames_per_batch
            self._iter += 1
            batch = self._hand_out(round_, slot)
            # Beyond TorchRL's __iter__.
            self._updates.batch_handed_out(stacklevel=3, others=self._weights.others())
            if self.post_collect_hook is not None:
                self.post_collect_hook(batch)
            yield self._kept(batch)
            refuse_within_block(self.policy, "the next batch was asked for")
            self._agree_on_an_update()
        self.shutdown()

    def _hand_out(self, round_: int, slot: TensorDictBase) -> TensorDictBase:
        """The batch of a full round as the user wants it."""
        if self.storing_device.type != "cpu":
            batch = slot.to(self.storing_device)
        else:
            # Keys that the user adds to a batch must not turn up in a later one.
            batch = slot.copy() if self.return_same_td else slot.clone()
            if self._names_device:
                batch = batch.to(self.storing_device)
        batch["policy_version"] = torch.full(
            batch.shape, round_, dtype=torch.int64, device=self.storing_device
        )
        for key in self._truncated_keys:
            for flag in (key, (*key[:-1], "done")):
                batch.get(flag)[:, -1] = True
        if self.cat_results != "stack":
            batch = batch.reshape(-1)
            batch.names = ["time"]  # as TorchRL has it
        if self.split_trajs:
            batch = split_trajectories(batch, prefix="collector")
        if self.postproc is not None:
            batch = self.postproc(batch)
        return batch

    def _kept(self, batch: TensorDictBase) -> Any:
        """The batch, or None if it is in the replay buffer."""
        if self.replay_buffer is None:
            return batch
        extend(self.replay_buffer, batch, splits=self.split_trajs)
        return None

    # What users and TorchRL's trainers call.

    def update_policy_weights_(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Any] | None = None,
        policy: nn.Module | None = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        policy_weights: TensorDictBase | Mapping[str, Any] | None = None,
    ) -> None:
        """Stage parameters for the rounds that open until the next call.

        Without arguments those of the policy, the newest when a round opens: the default. So it
        makes no difference whether an update comes before the call or after it. The same holds for
        tensors of the policy itself, under any names. Others are copied at the call, and so is what
        they leave out.
        Takes the forms that TorchRL's collectors take, for one model, ``"policy"``, and for all
        actors together.

        Args:
            policy_or_weights: a module, a TensorDict, or a dict of tensors by name.
            weights: the same as a keyword, a TensorDict or a dict alone.
            policy: the same as a keyword, a module alone.
            worker_ids: refused, since all actors act with the parameters of the round.
            model_id: ``"policy"``, or nothing.
            weights_dict: ``{"policy": weights}``.
            policy_weights: the old name of `policy_or_weights`, with a DeprecationWarning.

        Raises:
            TypeError: for ``worker_ids``, and for what is no module, TensorDict or dict by name.
            KeyError: for another model, or a name that the policy doesn't have.
            ValueError: for a tensor of another shape, or for two forms at once.
            RuntimeError: in a block of a `DelayedGradient`, where the policy is not the newest.
        """
        forms = {"policy_or_weights": policy_or_weights, "weights": weights, "policy": policy}
        forms["policy_weights"] = policy_weights
        given = the_weights(
            forms, weights_dict=weights_dict, worker_ids=worker_ids, model_id=model_id
        )
        super().update_policy_weights_(given, model_id=model_id)

    def _maybe_fallback_update(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        *,
        model_id: str | None = None,
    ) -> None:
        """Stage parameters for the next round that opens (see ``update_policy_weights_``)."""
        if model_id not in (None, "policy"):
            raise KeyError(f"HTSCollector has one model, 'policy'; got model_id={model_id!r}")
        refuse_within_block(
            self.policy, "update_policy_weights_ was called", tensors_in(policy_or_weights)
        )
        self._learner.stage(policy_or_weights)
        if self._weights.others():
            self._updates.staged_others()

    @property
    def policy_version(self) -> int:
        """Index of the newest parameters that a round may act with."""
        return self._learner.policy_version

    @property
    def seed(self) -> int:
        """What environments and action noise are seeded from."""
        return self._learner.seed

    @property
    def spaces(self) -> dict[str, str]:
        """What its environments' spaces are, in words; see `torchrl_hts.testing.spaces_of`."""
        return dict(self._spaces)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments and action noise, and reset the environments.

        Before the first batch this makes everything reproducible from batch 0 on. Later, what has
        been collected beyond the last batch is dropped.

        Args:
            seed: an int >= 0.
            static_seed: give every environment the same seed.

        Returns:
            A seed to go on with, ``seed`` itself if ``static_seed``.

        Raises:
            TypeError: for a seed that is no integer.
            ValueError: for one below 0.
            RuntimeError: after `shutdown`.
        """
        check_flags(static_seed=static_seed)
        seed = check_integer("seed", seed, least=0, most=None)
        self._learner.begin_anew(seed, static_seed)
        return seed if static_seed else seed + self.num_envs

    def statistics(self, *, memory: bool = False) -> Statistics:
        """A snapshot of what has been counted; cheap, and valid after the end too.

        Args:
            memory: read how much memory each worker, and this process, has to itself, too; that
                takes the system some milliseconds for each actor.
        """
        learner = self._learner
        return summarise(
            self._memory,
            self.num_executors,
            {} if self._workers.is_closed() else self.worker_pids(),
            of_memory=memory,
            frames=self._frames,
            collected=self._collected,
            rounds=self._iter + 1,
            elapsed_s=self._workers.clock_s() - learner.began if learner.began else 0.0,
            learner_waiting_s=learner.waited_s,
            restarts=self._supervisor.restarts.by_kind,
            invariant_sizes=self._invariant_sizes,
        )

    def timeline(self, path: str | os.PathLike[str], num_rounds: int | None = None) -> Timeline:
        """Write down when executors stepped and waited, actors inferred, and the learner learned.

        May be called at any time, after the end too. What is kept are the newest events of each
        worker, as many as ``timeline_events``.

        Args:
            path: a file that ends in .json or .json.gz becomes a trace for ui.perfetto.dev or
                chrome://tracing; one in .png, .svg or .pdf a picture (needs matplotlib).
            num_rounds: only the last so many rounds that the learner has been handed; by default
                all that are known in a trace, and 4 in a picture.

        Returns:
            What was written, as arrays.

        Raises:
            RuntimeError: if the collector was made without ``timeline_events``.
            TypeError: for a ``num_rounds`` that is no integer.
            ValueError: for a file name of another ending, or a ``num_rounds`` below 1.
        """
        file = check_path(path)
        if num_rounds is not None:
            num_rounds = check_integer("num_rounds", num_rounds)
        if not self._memory.layout.timeline_events:
            raise RuntimeError(
                "nothing was recorded: make the collector with timeline_events=100_000, so many "
                "events of each worker, to have a timeline of them"
            )
        found = read_timeline(self._memory, self.num_executors)
        found.write(file, num_rounds)
        return found

    def worker_pids(self) -> dict[str, int]:
        """Process ids by name, such as ``"executor 0"`` and ``"actor 0"``."""
        return {worker.name: worker.pid for worker in self._workers.processes}

    def state_dict(self) -> OrderedDict[str, Any]:
        """All that the coming batches depend on: `load_state_dict` goes on from it bit for bit.

        May be called at any time between two batches. Waits until the rounds under way are full, at
        most ``lag`` of them. The state holds their batches, the parameters that the next rounds act
        with, the counts, the seed, and the state of each environment.

        Environments whose state can't be saved (those of engines that don't offer it;
        `torchrl_hts.env_state` says which can) begin new episodes when the state is loaded,
        with seeds that depend on the seed, the environment and the round alone, and
        `load_state_dict` warns of it.

        One of several learners has the state of its own environments, and says which they are.

        Raises:
            RuntimeError: in a block of a `DelayedGradient`, where the policy is not the newest.
        """
        refuse_within_block(self.policy, "state_dict was called")
        policy = self.policy.state_dict()
        for name, value in policy.items():
            policy[name] = value.clone() if isinstance(value, torch.Tensor) else value
        place = {}
        if self._num_learners > 1:
            place = {"first_env": self._memory.layout.first_env, "all_envs": self.num_envs}
        return OrderedDict(
            policy_state_dict=policy,
            frames=self._frames // self._num_learners,
            iter=self._iter,
            lag=self.lag,
            num_envs=self._memory.layout.num_envs,
            sync_interval=self.sync_interval,
            init_random_frames=self.init_random_frames,
            invariant_sizes=asdict(self._invariant_sizes),
            spaces=self.spaces,
            **place,
            **self._learner.state_dict(),
        )

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where a state was taken: the next batch is that of its round.

        The update with the batch that was out then counts as done, and the policy's values are
        its result.

        Args:
            state_dict: what `state_dict` returned, of a collector with the same environments,
                policy, `frames_per_batch` and `lag`. The numbers of processes may differ. Of
                several learners each loads its own state, or a list of the states of all learners
                that there were, out of which it takes its own environments.

        Raises:
            TypeError, ValueError: if an entry is missing, damaged, or of a collector of another
                shape, policy or spaces; the message says which. Nothing has been changed then.
            WorldError: if learners have loaded states of different rounds or policies.
        """
        state = own_state(state_dict, self.policy, self._memory.layout, self._spaces)
        saved, sizes = saved_sizes(state), self._invariant_sizes
        alike = saved.fixed_rows == sizes.fixed_rows and saved.runs_like(sizes)
        if not alike or not set(sizes.sizes) & set(saved.sizes):
            warnings.warn(
                f"the run goes on, but not bit for bit: {sizes} here, {saved} where the state was "
                "taken (another machine, or another version of torch, numpy or torchrl_hts)",
                stacklevel=2,
            )
        at_random = state.get("init_random_frames", self.init_random_frames)
        frames = state["frames"] * self._num_learners
        if at_random != self.init_random_frames and frames < max(
            at_random, self.init_random_frames
        ):
            warnings.warn(
                f"the run goes on, but not bit for bit: init_random_frames={at_random} where the "
                f"state was taken, {self.init_random_frames} here",
                stacklevel=2,
            )
        self.policy.load_state_dict(state["policy_state_dict"])  # refuses another policy's
        self._learner.load_state_dict(state)
        self._updates.forget()
        self._frames = frames
        self._iter = state["iter"]
        if self.world is not None:
            policy = digest(value for _, value in policy_tensors(self.policy))
            self.world.agree(round=state["round"], policy=policy)

    def steps_ahead(self, env: int) -> TensorDictBase:
        """What a single environment has gone through since the last batch: to see how it failed.

        For when the workers have ended, after a WorkerError for one.

        Args:
            env: its number among this learner's environments.

        Returns:
            Its steps ``[T]`` in rounds that were not handed out, as batches have them. The last is
            the one that it was at, with what the policy read there and wrote. Its other entries are
            of older steps, and where it was waiting for its action, what the policy writes is too.

        Raises:
            ValueError: if there is no such environment.
        """
        return self._learner.steps_ahead(env)

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """End all workers; may be called again, and at any time.

        Args:
            timeout: seconds until workers that don't end by themselves are killed; 4 by default.
            close_env: accepted for compatibility. Environments are always closed.
            raise_on_error: accepted for compatibility. Failures have been raised by the iterator.

        Raises:
            TypeError, ValueError: for a timeout that is no number, or below 0.
        """
        if timeout is not None:
            timeout = check_number("timeout", timeout, least=0)
        self._workers.shutdown(timeout)

    def start(self) -> None:
        """Not offered: how much is collected between two updates would depend on timing.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "HTSCollector has no start(): iterate over it, with a replay_buffer if you have one, "
            "or give a trainer async_collection=False; the next round is collected meanwhile"
        )

    def __len__(self) -> int:
        if self._last_round is None:
            # A TypeError, by which list() and tqdm tell that they have to go without.
            raise TypeError("an endless collector (total_frames=-1) has no length")
        return self._last_round

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> HTSCollector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_envs={self.num_envs}, sync_interval={self.sync_interval}, "
            f"lag={self.lag}, num_executors={self.num_executors}, num_actors={self.num_actors}, "
            f"rounds={self._iter + 1})"
        )
