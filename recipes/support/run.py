"""The frame of a training loop: metrics, evaluation, checkpoints, resumption and a clean end."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from support.checkpoints import Checkpoints, save_atomically
from support.configuration import config_to_go_on_with
from support.display import Display
from support.errors import RecipeError, quoted
from support.evaluations import Evaluations
from support.learners import check_finite, episodes_of_all
from support.metrics import Row, learning_metrics, unlearned_metrics
from support.options import RunOptions, to_json
from support.output_dir import check_shared, claim_output_dir, find_output_dir
from support.records import Records
from support.saves import ON_BATCH, WHEN_SAVED, batches_of
from support.signals import StopSignals
from support.states import FORMAT, Stateful, random_states, starts_of, take_on, versions
from torchrl_hts import EpisodeReturns, HTSCollector, World, WorldError
from torchrl_hts.testing import digest

__all__ = ["Run"]


class Run:
    """Iterates over a collector's batches and does, between two rounds, all that is not learning.

    Leaves in the output directory: config.json, metrics.csv, evaluations.csv, curve.png, the
    checkpoints, policy.pt (the newest parameters) and best.pt (those that evaluated best).

    The first Ctrl-C, SIGTERM or SIGHUP saves a checkpoint after the present update and ends the
    run; a second one ends it at once.

    Of several learners the first alone prints, logs, evaluates and draws; each adds its part to the
    checkpoints. A signal to any of them ends all after the same update.

    Args:
        recipe: its name, which is also that of the directory under ``runs``.
        options: its options.
        collector: whose batches are learned from, and whose world are the learners.
        eval_env: makes an environment to evaluate in; called with ``render_mode="rgb_array"`` for
            one whose best episode is filmed.
        parts: all else that a checkpoint must hold, by name: models, optimizers, schedules. They
            must be the same on every learner.
        own_parts: those that each learner has of its own environments, such as a replay buffer.
            They are resumed with the states of all learners that had these, in a list.
        video_fps: frames per second of the film; by default the environment's.

    Raises:
        RecipeError: if the run can't be resumed, or the logger can't be made.
    """

    def __init__(
        self,
        recipe: str,
        options: RunOptions,
        collector: HTSCollector,
        eval_env: Callable[..., Any],
        parts: Mapping[str, Stateful],
        *,
        own_parts: Mapping[str, Stateful] | None = None,
        video_fps: float | None = None,
    ) -> None:
        self.options = options
        self.exit_code = 0
        self._world = collector.world or World()
        self._title = f"{recipe} on {options.task}"
        self._recipe = recipe
        self._collector = collector
        self._total_frames = len(collector) * collector.frames_per_batch
        self.output_dir, resumes = self._told(partial(find_output_dir, recipe, options))
        self._display = Display(self._total_frames, quiet=not self._world.is_first)
        self._returns = EpisodeReturns()
        self._own = {"collector": collector, **(own_parts or {})}
        self._parts = {"returns": self._returns, **parts}
        self._checkpoints = Checkpoints(self.output_dir / "checkpoints", options.keep_checkpoints)
        self._id = uuid.uuid4().hex[:8]
        self._wandb_names: Mapping[str, Any] | None = None  # of the run at W&B, if it is there
        self._earlier_starts: Sequence[Mapping[str, Any]] = ()
        self._elapsed_before_s = 0.0
        self._recorded: list[Row] = []
        self._first_step = 0  # of this start
        self._signals = StopSignals(
            # Other learners are told by the first, which may know already.
            tells=lambda: self._world.is_first and self._stop is None,
            has_saved=lambda: self.exit_code != 0 or self._has_ended,
        )
        self._stop: int | None = None  # that any learner was sent, as all have been told
        self._has_ended = False  # and all is saved, but for what its last evaluations find
        self._told_of_loss = False
        self._open(eval_env, video_fps, resumes=resumes)

    def _open(self, eval_env: Callable[..., Any], fps: float | None, *, resumes: bool) -> None:
        """Claim the directory, and go on with what is there; if that fails, close what is open."""
        with contextlib.ExitStack() as undoing:
            if self._world.is_first:
                self._claim = claim_output_dir(
                    self.output_dir,
                    holds_own_run=resumes,
                    resumes=self.options.resume is not None,
                )
                undoing.callback(self._claim.close)
            check_shared(self.output_dir, self._world)
            self._evaluations = Evaluations(
                self.options,
                eval_env,
                self._collector,
                self.output_dir,
                fps,
                self.say,
                plays=self._world.is_first and not ON_BATCH,
            )
            undoing.callback(self._evaluations.close)
            if self._world.is_first:
                self._parts["evaluations"] = self._evaluations
            kept_rows = self._resume() if resumes else 0
            self._records: Records | None = None  # the first learner's
            if self._world.is_first:
                self._records = Records(
                    self._recipe,
                    self.options,
                    self._claim,
                    self._display,
                    run_id=self._id,
                    earlier_names=self._wandb_names,
                    earlier_starts=self._earlier_starts,
                    kept_rows=kept_rows,
                    elapsed_before_s=self._elapsed_before_s,
                    first_step=self._first_step,
                    spaces=self._collector.spaces,
                )
                undoing.callback(self._close_records, failed=True)
                self._id = self._records.run_id
                self._evaluations.open(self._claim)
                self._records.catch_up(self._evaluations.rows)
            undoing.pop_all()

    def _told(self, find: Callable[[], Any]) -> Any:
        """What the first learner finds, on every learner."""
        return self._world.gather(find() if self._world.is_first else None)[0]

    @property
    def step(self) -> int:
        """Environment steps that have been learned from."""
        return (self._collector._iter + 1) * self._collector.frames_per_batch

    # The loop.

    def __enter__(self) -> Run:
        self._display.__enter__()
        self._signals.take()
        collector = self._collector
        learners = f"learners {self._world.size}, " if self._world.size > 1 else ""
        self.say(
            f"{self._title}: {learners}environments {collector.num_envs}, executors "
            f"{collector.num_executors}, actors {collector.num_actors}; files in {self.output_dir}"
        )
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.ExitStack() as closing:  # each, even if one of them fails
            stops = self._stop is not None and not self._has_ended and exception[0] is None
            among_others = stops and self._world.size > 1
            closing.callback(self._signals.give_back, ignoring_sigterm=among_others)
            if self.exit_code:
                closing.callback(self._world.close, ended=False)
            if stops:  # torchrun ends all when the first has ended with an error
                closing.callback(self._world.gather, None)
            if self._world.is_first:
                closing.callback(self._claim.close)
                closing.callback(self._close_records, failed=exception[0] is not None)
            closing.callback(self._evaluations.close)
            closing.callback(self._display.__exit__, *exception)
            if not isinstance(exception[1], RecipeError | None) and not ON_BATCH:
                error = exception[1] if self._world.size == 1 or self.options.shards else None
                closing.callback(lambda: self.say(self._checkpoints.how_to_go_on(error)))

    def _close_records(self, *, failed: bool) -> None:
        if self._records is not None:
            self._records.close(self._title, self._evaluations.rows, int(failed) or self.exit_code)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yields the batches; what has to be done after an update is done between two."""
        if self.step >= self._total_frames and not self._evaluations.pending:
            self.say("this run has ended: there is nothing left to do")
        for batch in batches_of(self._collector):
            self._returns.update(episodes_of_all(self._world, batch))
            self._recorded.clear()
            yield batch
            at_end = self.step >= self._total_frames
            self._after_update(at_end)
            if at_end:
                break
            if self._stop is not None:
                self._end_early(self._stop)
                return
        self._has_ended = True  # what is left to do concerns the first learner alone
        if self._evaluations.pending and self._signals.number is None:
            self._play_last_evaluations()
        if self._signals.number is not None:
            self._end_early(self._signals.number)

    def _play_last_evaluations(self) -> None:
        assert self._records is not None  # others have none pending
        self.say(
            "the training is done and saved; the last evaluations are being played (Ctrl-C "
            "leaves them to --resume)"
        )
        while self._evaluations.pending and self._signals.number is None:
            time.sleep(0.05)
            for evaluation in self._evaluations.take():
                self._records.evaluated(evaluation, self.step)
        if self._signals.number is None:
            self._save()

    def _after_update(self, at_end: bool) -> None:
        """All that is to be done between an update and the next batch.

        First all that a checkpoint counts on. If others fail to take it up (a logger), what has
        been learned is saved. A run that fails in any other way goes on from its last checkpoint.
        """
        failure = None if self._records is None else self._report(self._records, at_end)
        saved = at_end or self._is_due(self.options.checkpoint_interval)
        if saved:
            self._save()
        # Each learner's news to all, once a round; when the training is done it goes its own way.
        news = [(failure is not None, self._signals.number)]
        if not at_end:
            news = self._world.gather(news[0])
        failed = any(failing for failing, _ in news)
        self._stop = next((number for _, number in news if number is not None), None)
        if failed and not saved:
            with contextlib.suppress(Exception):
                self._save()
        if failure is not None:
            raise failure
        if failed:
            raise RecipeError("the run ends, since its first learner has failed")

    def _report(self, records: Records, at_end: bool) -> Exception | None:
        """Measure, evaluate, and tell of it; returns what the logger or the display raised."""
        row = None
        if at_end or self._is_due(self.options.log_interval):
            statistics = self._collector.statistics()
            row = records.measure(self.step, self._returns, statistics, self._recorded)
        if at_end or self._is_due(self.options.eval_interval):
            self._evaluations.submit(self.step)
        evaluations = self._evaluations.take()
        try:
            if row is not None:
                records.show(row, at_once=at_end)
            for evaluation in evaluations:
                records.evaluated(evaluation, self.step)
        except Exception as error:
            return error
        return None

    def _end_early(self, number: int) -> None:
        self._save()
        self.exit_code = 128 + number
        if not ON_BATCH:
            self.say(f"stopped; go on with --resume {quoted(self.output_dir)}")

    def record(
        self, losses: Sequence[TensorDictBase], gradient_norm: Tensor, learning_rate: float
    ) -> None:
        """Take in an optimizer step; a row of metrics holds the means over those of its round.

        Args:
            losses: what the loss module returned for each part of the minibatch. Their mean over
                all learners is taken.
            gradient_norm: before it was clipped.
            learning_rate: of the step.

        Raises:
            RecipeError: if one of them is infinite or NaN; on every learner.
        """
        row = learning_metrics(losses, gradient_norm, learning_rate, self._world.mean)
        check_finite(self._world, row, losses, self.step)
        self._recorded.append(row)

    def record_none(self, keys: Collection[str]) -> None:
        """Take in that this round has no optimizer step; a row of metrics then has NaN.

        Args:
            keys: of what the loss module would return.
        """
        self._recorded.append(unlearned_metrics(keys))

    def say(self, text: str) -> None:
        """Print a line, if this is the first learner."""
        self._display.say(text)

    @property
    def last_evaluation(self) -> float:
        """Mean return of the newest evaluation; NaN before the first, and on other learners."""
        rows = self._evaluations.rows
        return rows[-1]["evaluation/return_mean"] if rows else float("nan")

    def _is_due(self, interval: int) -> bool:
        """Whether this round reached a multiple of the interval."""
        return interval > 0 and self.step % interval < self._collector.frames_per_batch

    # Checkpoints.

    def _save(self) -> None:
        """Write a checkpoint by all learners, and the newest policy beside it."""
        if self._has_ended and self._world.size > 1:
            if self._world.is_first:
                self._save_evaluations()
            return
        own = {name: dict(part.state_dict()) for name, part in self._own.items()}
        self._world.agree(policy=digest(self._collector.policy.parameters()))
        try:
            self._world.save(lambda: self._save_part(own), lambda: self._save_rest(own))
        except WorldError as error:
            if isinstance(error.__cause__, RecipeError | OSError):
                raise error.__cause__ from None
            raise
        lost = own["collector"]["why_environments_are_lost"]
        if lost and not self._told_of_loss:
            self.say(f"a run that is resumed from here begins new episodes: {lost}")
            self._told_of_loss = True
        for tell in WHEN_SAVED:
            tell(self.output_dir, {} if self._records is None else self._records.newest)

    def _save_part(self, own: dict[str, Any]) -> None:
        """Write what this learner's checkpoint counts on."""
        if self._records is not None:
            self._records.sync()
            self._evaluations.sync()
        else:
            self._checkpoints.save_part(self.step, self._world.rank, self._world.size, own)

    def _save_rest(self, own: dict[str, Any]) -> None:
        """Write the file that makes the parts a checkpoint."""
        assert self._records is not None
        state = {
            "format": FORMAT,
            "recipe": self._recipe,
            "options": to_json(self.options),
            "versions": versions(),
            "id": self._id,
            "step": self.step,
            "learners": self._world.size,
            "elapsed_s": self._elapsed_before_s + self._collector.statistics().elapsed_s,
            "rows": self._records.num_rows,
            "random_states": random_states(),
            "parts": own | {name: dict(part.state_dict()) for name, part in self._parts.items()},
        }
        self._checkpoints.save(self.step, state)
        on_cpu = {name: v.cpu() for name, v in self._collector.policy.state_dict().items()}
        save_atomically(self.output_dir / "policy.pt", on_cpu)

    def _save_evaluations(self) -> None:
        """Add what evaluations have found since to the checkpoint of the training's end."""
        state = self._checkpoints.load()
        if state is not None:
            self._evaluations.sync()
            state["parts"]["evaluations"] = dict(self._evaluations.state_dict())
            self._checkpoints.save(state["step"], state)

    def _resume(self) -> int:
        """Load the newest checkpoint; returns the rows of metrics before it."""
        config = config_to_go_on_with(self.output_dir, self._recipe)
        self._wandb_names = config.get("wandb")
        self._earlier_starts = starts_of(config)
        newest, world = self._told(self._checkpoints.newest), self._world
        if newest is None:
            self.say(f"there is no checkpoint in {self.output_dir} yet: the run begins anew")
            self._id = config.get("id", self._id)
            return 0
        state = self._checkpoints.load(newest)
        take_on(
            state,
            newest,
            recipe=self._recipe,
            options=self.options,
            parts={**self._own, **self._parts},
            own=self._own,
            of_learners=partial(
                self._checkpoints.parts_of_learners, newest, state, world.rank, world.size
            ),
            learners=world.size,
        )
        self._id, self._first_step = state["id"], state["step"]
        self._elapsed_before_s = state["elapsed_s"]
        self.say(
            f"resumed from {newest}: {state['step']:,} of {self._total_frames:,} steps are done"
        )
        return state["rows"]
