"""What a run tells while it goes on: metrics.csv, the logger and the display, and its curve."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

from support.checkpoints import write_atomically
from support.display import Display
from support.launch import launch_name
from support.loggers import make_logger, wandb_names
from support.metrics import (
    Row,
    Table,
    draw_curve,
    episode_metrics,
    evaluation_metrics,
    time_metrics,
)
from support.options import RunOptions, to_json
from support.output_dir import Claim
from support.states import machine, versions, with_this_start
from torchrl_hts import EpisodeReturns, Evaluation, Statistics

__all__ = ["Records"]


class Records:
    """Begins, or goes on with, all that the first learner writes while the run goes on.

    Args:
        recipe: its name.
        options: its options.
        claim: of the directory that the files go to.
        display: that shows the newest row, and says what has to be said.
        run_id: of the run, at W&B too unless that has another name for it.
        earlier_names: of the run at W&B, if it has been there.
        earlier_starts: see `starts_of`; of those before this one.
        kept_rows: of metrics; what was written after them is cut off.
        elapsed_before_s: the time that the run took before it was resumed.
        first_step: that it goes on from.
        spaces: of the environments of its training, in words.

    Attributes:
        run_id: of the run.

    Raises:
        RecipeError: if the logger can't be made.
    """

    def __init__(
        self,
        recipe: str,
        options: RunOptions,
        claim: Claim,
        display: Display,
        *,
        run_id: str,
        earlier_names: Mapping[str, Any] | None,
        earlier_starts: Sequence[Mapping[str, Any]],
        kept_rows: int,
        elapsed_before_s: float,
        first_step: int,
        spaces: Mapping[str, str],
    ) -> None:
        self._options, self._claim, self._display = options, claim, display
        output_dir = claim.directory
        self._elapsed_before_s = elapsed_before_s
        self._last_speed = (first_step, 0.0)
        self.run_id = run_id
        names: Mapping[str, Any] | None = earlier_names
        if options.logger == "wandb":
            names = wandb_names(options, output_dir, run_id, earlier_names)
            self.run_id = names["id"]
        self._logger = make_logger(options, output_dir, names)
        with contextlib.ExitStack() as undoing:
            undoing.callback(self._close_logger, 1)
            config = {
                "recipe": recipe,
                "id": self.run_id,
                "launch": launch_name(),
                "wandb": names,
                "options": to_json(options),
                "versions": versions(),
                "machine": machine(),
                "spaces": dict(spaces),
                "starts": with_this_start(earlier_starts, first_step),
            }
            write_atomically(
                output_dir / "config.json", (json.dumps(config, indent=2) + "\n").encode()
            )
            self._metrics = Table(output_dir / "metrics.csv", keep=kept_rows)
            undoing.pop_all()

    def catch_up(self, evaluations: Sequence[Row]) -> None:
        """Tell a W&B that is offline all rows of before; say so if it is disabled.

        Each start writes a file of its own there, and a killed one may have left nothing.
        """
        if self._options.logger != "wandb":
            return
        if self._logger is None:
            self._display.say("Weights & Biases is disabled: no metrics go there")
        elif self._logger.experiment.offline:
            for row in sorted([*self._metrics.rows, *evaluations], key=itemgetter("step")):
                self.send(row)

    @property
    def num_rows(self) -> int:
        """Rows of metrics so far."""
        return len(self._metrics.rows)

    @property
    def newest(self) -> Row:
        """The newest row of metrics; empty before the first."""
        return dict(self._metrics.rows[-1]) if self._metrics.rows else {}

    def measure(
        self,
        step: int,
        returns: EpisodeReturns,
        statistics: Statistics,
        learned: Sequence[Row],
    ) -> Row:
        """Add a row to the metrics, and return it.

        Args:
            step: environment steps that have been learned from.
            returns: of the last episodes.
            statistics: of the collector.
            learned: a row of each optimizer step since the last batch; their means are taken.
        """
        means = {
            name: fmean(each[name] for each in learned) for name in (learned[0] if learned else ())
        }
        row = {
            "step": step,
            **episode_metrics(returns),
            **means,
            **time_metrics(statistics, self._last_speed, self._elapsed_before_s),
        }
        self._last_speed = (statistics.frames, statistics.elapsed_s)
        self._metrics.append(row)
        return row

    def show(self, row: Row, *, at_once: bool) -> None:
        """Give a new row of metrics to the logger and to the display."""
        self.send(row)
        self._display.show(row, at_once=at_once)

    def evaluated(self, evaluation: Evaluation, step: int) -> None:
        """Tell of an evaluation, where the training has got to a step."""
        self.send(evaluation_metrics(evaluation))
        late = step - evaluation.step
        self._display.say(
            f"{evaluation.step:,} steps: evaluation return {evaluation.mean:.1f} "
            f"({evaluation.min:.1f} to {evaluation.max:.1f})"
            + (f", {late:,} steps late" if late > self._options.eval_interval else "")
        )

    def send(self, row: Row) -> None:
        """Give a row to the logger; NaN, where there is nothing yet, is left out."""
        if self._logger is not None:
            metrics = {k: v for k, v in row.items() if k != "step" and not math.isnan(v)}
            self._logger.log_metrics(metrics, step=int(row["step"]))

    def sync(self) -> None:
        """Have all rows on the disk.

        Raises:
            RecipeError: if they can't be, or the directory is not where it was.
        """
        self._claim.check()
        self._metrics.sync()

    def close(self, title: str, evaluations: Sequence[Row], exit_code: int) -> None:
        """Draw the curve, and close the files and the logger: each, even if another fails.

        Args:
            title: of the curve.
            evaluations: to draw.
            exit_code: that the logger is told.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._close_logger, exit_code)
            closing.callback(self._draw_curve, title, evaluations)
            closing.callback(self._metrics.close)

    def _draw_curve(self, title: str, evaluations: Sequence[Row]) -> None:
        file = self._claim.directory / "curve.png"
        if self._metrics.rows and self._claim.holds():
            try:
                draw_curve(file, title, self._metrics.rows, evaluations)
            except OSError as error:  # no reason to hide how the run ended
                self._display.say(f"{file} can't be written: {error.strerror}")

    def _close_logger(self, exit_code: int) -> None:
        if self._logger is None:
            return
        experiment = self._logger.experiment
        if self._options.logger == "wandb":
            experiment.finish(exit_code=exit_code)
        elif hasattr(experiment, "close"):
            experiment.close()
