"""The evaluations of a run: played beside the training, written down, and the best one kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torchrl.envs.utils import ExplorationType

from support.checkpoints import save_atomically
from support.films import try_out
from support.metrics import Row, Table, evaluation_metrics
from support.options import RunOptions
from support.output_dir import Claim
from torchrl_hts import Evaluation, Evaluator, HTSCollector, ResourceError, WorkerError

__all__ = ["Evaluations"]

_EVALUATORS = 4  # how many are started for one that fails, it included


class Evaluations:
    """Plays evaluations in a process of its own, and keeps evaluations.csv and best.pt.

    An evaluator that fails is replaced, and what was pending is played again; after three
    replacements the run goes on without evaluations. What is pending then stays part of the state,
    so that a resumed run plays it.

    Args:
        options: of the run; with an ``eval_interval`` of 0 nothing is evaluated.
        make_env: makes an environment to evaluate in; called with ``render_mode="rgb_array"`` for
            one whose best episode is filmed.
        collector: whose policy is evaluated.
        output_dir: where the files lie.
        video_fps: frames per second of the film; by default the environment's.
        say: prints a line.
        plays: whether anything is played and written; not by the others of several learners.
    """

    def __init__(
        self,
        options: RunOptions,
        make_env: Callable[..., Any],
        collector: HTSCollector,
        output_dir: Path,
        video_fps: float | None,
        say: Callable[[str], None],
        *,
        plays: bool = True,
    ) -> None:
        self._options = options
        self._make_env = make_env
        self._policy = collector.policy
        self._output_dir = output_dir
        self._video_fps = video_fps
        self._say = say
        self._best = -math.inf
        self._kept_rows = 0
        self._table: Table | None = None
        self._works = plays and options.eval_interval > 0
        if self._works and options.record_video:  # refused here, in a sentence
            try_out(make_env, "rgb_array")
        self._evaluator = self._make_evaluator() if self._works else None
        self._started = 1

    def _make_evaluator(self) -> Evaluator:
        options = self._options
        render_env = partial(self._make_env, render_mode="rgb_array")
        sampled = ExplorationType.RANDOM if options.eval_sampled else ExplorationType.DETERMINISTIC
        return Evaluator(
            self._make_env,
            self._policy,
            num_episodes=options.eval_episodes,
            seed=options.seed,
            exploration_type=sampled,
            max_frames_per_episode=options.eval_max_steps,
            video_path=self._output_dir / "best.mp4" if options.record_video else None,
            create_render_env_fn=render_env if options.record_video else None,
            fps=self._video_fps,
        )

    def open(self, claim: Claim) -> None:
        """Open evaluations.csv, after a state was loaded; rows that it doesn't know are dropped.

        Args:
            claim: of the output directory.
        """
        self._claim = claim
        self._table = Table(self._output_dir / "evaluations.csv", keep=self._kept_rows)

    @property
    def rows(self) -> list[Row]:
        """A row of metrics for each evaluation."""
        return self._table.rows if self._table is not None else []

    @property
    def pending(self) -> bool:
        """Whether there are evaluations to wait for."""
        return self._works and bool(self._evaluator.pending)

    def submit(self, step: int) -> None:
        """Ask for an evaluation of the policy as it is after `step` environment steps."""
        if self._works:
            try:
                self._evaluator.submit(step)  # stays pending if it fails
            except WorkerError as error:
                self._replace_evaluator(error)

    def take(self) -> list[Evaluation]:
        """Write down what has been finished since the last call, and return it."""
        if not self._works:
            return []
        try:
            finished = self._evaluator.poll()
        except WorkerError as error:
            self._replace_evaluator(error)
            return []
        for evaluation in finished:
            self._table.append(evaluation_metrics(evaluation))
            if evaluation.mean > self._best:
                self._keep(evaluation)
        return finished

    def _keep(self, evaluation: Evaluation) -> None:
        self._claim.check()
        self._best = evaluation.mean
        best = {"step": evaluation.step, "return": evaluation.mean}
        save_atomically(self._output_dir / "best.pt", {**best, "policy": evaluation.parameters})

    def _replace_evaluator(self, failure: WorkerError) -> None:
        """Play what is pending in a new process; go on without one if that fails too often."""
        evaluator = None
        try:
            if self._started == _EVALUATORS:
                raise failure
            self._started += 1
            evaluator = self._make_evaluator()
            evaluator.load_state_dict(self._evaluator.state_dict())
        except (WorkerError, ResourceError) as error:
            if evaluator is not None:
                evaluator.shutdown()
            self._works = False
            self._say(
                f"there are no more evaluations: {error}\na resumed run plays those that were "
                "asked for until now"
            )
            return
        self._evaluator.shutdown()
        self._evaluator = evaluator
        self._say(f"evaluations are played again in a new process: {failure}")

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        evaluator = self._evaluator.state_dict() if self._evaluator is not None else None
        return {"rows": len(self.rows), "best": self._best, "evaluator": evaluator}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; to be called before :meth:`open`."""
        self._kept_rows = state_dict["rows"]
        self._best = state_dict["best"]
        if self._evaluator is not None:
            self._evaluator.load_state_dict(state_dict["evaluator"])

    def sync(self) -> None:
        """Make sure that evaluations.csv is on the disk."""
        self._table.sync()

    def close(self) -> None:
        """End the process and close the file."""
        try:
            if self._evaluator is not None:
                self._evaluator.shutdown()
        finally:
            if self._table is not None:
                self._table.close()
