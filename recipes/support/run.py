"""The frame of a training loop: metrics, evaluation, checkpoints, resumption and a clean end."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from support.checkpoints import Checkpoints, save_atomically, write_atomically
from support.display import Display
from support.errors import InterruptedTwice, RecipeError, quoted
from support.evaluations import Evaluations
from support.loggers import make_logger, wandb_names
from support.metrics import (
    Row,
    Table,
    draw_curve,
    episode_metrics,
    evaluation_metrics,
    learning_metrics,
    time_metrics,
)
from support.options import RunOptions, differences, refuse_old_run, to_json
from torchrl_hts import EpisodeReturns, Evaluation, HTSCollector

__all__ = ["Run"]

_FORMAT = 2  # of checkpoints
_PACKAGES = (
    *("torchrl_hts", "torch", "torchrl", "tensordict", "gymnasium", "numpy"),
    *("ale-py", "opencv-python", "opencv-python-headless", "envpool", "gfootball"),
)


class Stateful(Protocol):
    """What a checkpoint can hold."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Run:
    """Iterates over a collector's batches and does, between two rounds, all that is not learning.

    Leaves in the output directory: config.json, metrics.csv, evaluations.csv, curve.png, the
    checkpoints, policy.pt (the newest parameters) and best.pt (those that evaluated best).

    The first Ctrl-C, SIGTERM or SIGHUP saves a checkpoint after the present update and ends the
    run; a second one ends it at once.

    Args:
        recipe: its name, which is also that of the directory under ``runs``.
        options: its options.
        collector: whose batches are learned from.
        eval_env: makes an environment to evaluate in; called with ``render_mode="rgb_array"`` for
            one whose best episode is filmed.
        parts: all else that a checkpoint must hold, by name: models, optimizers, schedules.
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
        video_fps: float | None = None,
    ) -> None:
        name = options.task.rpartition("/")[2]
        started = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        self.options = options
        self.output_dir = (
            options.resume or options.output_dir or Path("runs", recipe, f"{name}-{started}")
        )
        self.exit_code = 0
        self._title = f"{recipe} on {options.task}"
        self._recipe = recipe
        self._collector = collector
        self._display = Display(self._total_frames)
        self._returns = EpisodeReturns()
        self._parts: dict[str, Stateful] = {
            "collector": collector,
            "returns": self._returns,
            **parts,
        }
        self._checkpoints = Checkpoints(self.output_dir / "checkpoints", options.keep_checkpoints)
        self._id = uuid.uuid4().hex[:8]
        self._wandb_names: Mapping[str, Any] | None = None  # of the run at W&B, if it is there
        self._elapsed_before_s = 0.0
        self._recorded: list[Row] = []
        self._last_speed = (0, 0.0)
        self._stop_signal: int | None = None
        self._told_of_loss = False
        self._claim_output_dir()
        with contextlib.ExitStack() as undoing:
            undoing.callback(self._lock.close)
            self._evaluations = self._parts["evaluations"] = Evaluations(
                options, eval_env, collector, self.output_dir, video_fps, self.say
            )
            undoing.callback(self._evaluations.close)
            kept_rows = self._resume() if options.resume is not None else 0
            if options.logger == "wandb":
                self._wandb_names = wandb_names(
                    options, self.output_dir, self._id, self._wandb_names
                )
                self._id = self._wandb_names["id"]
            self._logger = make_logger(options, self.output_dir, self._wandb_names)
            undoing.callback(self._close_logger, failed=True)
            config = {
                "recipe": recipe,
                "id": self._id,
                "wandb": self._wandb_names,
                "options": to_json(options),
                "versions": _versions(),
            }
            write_atomically(
                self.output_dir / "config.json", (json.dumps(config, indent=2) + "\n").encode()
            )
            self._metrics = Table(self.output_dir / "metrics.csv", keep=kept_rows)
            undoing.callback(self._metrics.close)
            self._evaluations.open()
            if options.logger == "wandb" and self._logger is None:
                self.say("Weights & Biases is disabled: no metrics go there")
            elif options.logger == "wandb" and self._logger.experiment.offline:
                # Each start writes a file of its own, and a killed one may have left nothing.
                for row in sorted(
                    self._metrics.rows + self._evaluations.rows, key=itemgetter("step")
                ):
                    self._send(row)
            undoing.pop_all()

    def _claim_output_dir(self) -> None:
        """Make the output directory, and keep other runs out of it as long as this process lives.

        Raises:
            RecipeError: if it can't be written to, or another run is at work in it.
        """
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._lock = (self.output_dir / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(
                f"another run is at work in {self.output_dir}: wait for its end, or give another "
                "--output-dir"
            ) from None
        except OSError as error:
            raise RecipeError(
                f"{self.output_dir} can't be written to: {error.strerror}; give another "
                "--output-dir"
            ) from error
        if self.options.resume is None:
            refuse_old_run(self.output_dir)  # one that has ended since the options were read

    @property
    def step(self) -> int:
        """Environment steps that have been learned from."""
        return (self._collector._iter + 1) * self._collector.frames_per_batch

    @property
    def _total_frames(self) -> int:
        return len(self._collector) * self._collector.frames_per_batch

    # The loop.

    def __enter__(self) -> Run:
        self._display.__enter__()
        self._handlers = {
            number: signal.signal(number, self._stop)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
        }
        collector = self._collector
        self.say(
            f"{self._title}: environments {collector.num_envs}, executors "
            f"{collector.num_executors}, actors {collector.num_actors}; files in {self.output_dir}"
        )
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.ExitStack() as closing:  # each, even if one of them fails
            for number, handler in self._handlers.items():
                closing.callback(signal.signal, number, handler)
            closing.callback(self._lock.close)
            closing.callback(self._close_logger, failed=exception[0] is not None)
            closing.callback(self._draw_curve)
            closing.callback(self._evaluations.close)
            closing.callback(self._metrics.close)
            closing.callback(self._display.__exit__, *exception)

    def _draw_curve(self) -> None:
        file = self.output_dir / "curve.png"
        if self._metrics.rows:
            try:
                draw_curve(file, self._title, self._metrics.rows, self._evaluations.rows)
            except OSError as error:  # no reason to hide how the run ended
                self.say(f"{file} can't be written: {error.strerror}")

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yields the batches; what has to be done after an update is done between two."""
        if self.step >= self._total_frames and not self._evaluations.pending:
            self.say("this run has ended: there is nothing left to do")
        for batch in self._collector:
            self._returns.update(batch)
            self._recorded.clear()
            yield batch
            at_end = self.step >= self._total_frames
            self._after_update(at_end)
            if at_end:
                break
            if self._stop_signal is not None:
                self._end_early()
                return
        if self._evaluations.pending and self._stop_signal is None:
            self._play_last_evaluations()
        if self._stop_signal is not None:
            self._end_early()

    def _play_last_evaluations(self) -> None:
        self.say(
            "the training is done and saved; the last evaluations are being played (Ctrl-C "
            "leaves them to --resume)"
        )
        while self._evaluations.pending and self._stop_signal is None:
            time.sleep(0.05)
            self._tell(None, self._evaluations.take())
        if self._stop_signal is None:
            self._save()

    def _after_update(self, at_end: bool) -> None:
        """All that is to be done between an update and the next batch.

        First all that a checkpoint counts on. If others fail to take it up (a logger), what has
        been learned is saved. A run that fails in any other way goes on from its last checkpoint.
        """
        row = self._measure() if at_end or self._is_due(self.options.log_interval) else None
        if at_end or self._is_due(self.options.eval_interval):
            self._evaluations.submit(self.step)
        evaluations = self._evaluations.take()
        try:
            self._tell(row, evaluations, at_once=at_end)
        except Exception:
            with contextlib.suppress(Exception):
                self._save()
            raise
        if at_end or self._is_due(self.options.checkpoint_interval):
            self._save()

    def _end_early(self) -> None:
        self._save()
        self.exit_code = 128 + self._stop_signal
        self.say(f"stopped; go on with --resume {quoted(self.output_dir)}")

    def record(self, losses: TensorDictBase, gradient_norm: Tensor, learning_rate: float) -> None:
        """Take in an optimizer step; a row of metrics holds the means over those of its round.

        Args:
            losses: what the loss module returned.
            gradient_norm: before it was clipped.
            learning_rate: of the step.

        Raises:
            RecipeError: if one of them is infinite or NaN.
        """
        row = learning_metrics(losses, gradient_norm, learning_rate)
        if not all(map(math.isfinite, row.values())):
            wrong = ", ".join(name for name, value in row.items() if not math.isfinite(value))
            raise RecipeError(
                f"the training has diverged: {wrong} after {self.step:,} steps. Begin anew with "
                "another --output-dir and a lower --learning-rate"
            )
        self._recorded.append(row)

    def say(self, text: str) -> None:
        """Print a line."""
        self._display.say(text)

    @property
    def last_evaluation(self) -> float:
        """Mean return of the newest evaluation; NaN before the first."""
        rows = self._evaluations.rows
        return rows[-1]["evaluation/return_mean"] if rows else float("nan")

    def _is_due(self, interval: int) -> bool:
        """Whether this round reached a multiple of the interval."""
        if interval <= 0:
            return False
        return self.step // interval > (self.step - self._collector.frames_per_batch) // interval

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop_signal is not None:
            raise InterruptedTwice(saved=self.exit_code != 0)
        self._stop_signal = number
        # Not by print, in the middle of which the signal may have come.
        with contextlib.suppress(OSError):  # from a terminal that has been closed
            os.write(
                2, b"\nstopping after this update; once more to stop at once, without saving\n"
            )

    # What is written.

    def _measure(self) -> Row:
        """Add a row to the metrics."""
        statistics = self._collector.statistics()
        means = {
            name: fmean(each[name] for each in self._recorded)
            for name in (self._recorded[0] if self._recorded else ())
        }
        row = {
            "step": self.step,
            **episode_metrics(self._returns),
            **means,
            **time_metrics(statistics, self._last_speed, self._elapsed_before_s),
        }
        self._last_speed = (statistics.frames, statistics.elapsed_s)
        self._metrics.append(row)
        return row

    def _tell(
        self, row: Row | None, evaluations: list[Evaluation], *, at_once: bool = False
    ) -> None:
        """Give new rows to the logger and to the display."""
        if row is not None:
            self._send(row)
            self._display.show(row, at_once=at_once)
        for evaluation in evaluations:
            self._send(evaluation_metrics(evaluation))
            late = self.step - evaluation.step
            self.say(
                f"{evaluation.step:,} steps: evaluation return {evaluation.mean:.1f} "
                f"({evaluation.min:.1f} to {evaluation.max:.1f})"
                + (f", {late:,} steps late" if late > self.options.eval_interval else "")
            )

    def _send(self, row: Row) -> None:
        """Give a row to the logger; NaN, where there is nothing yet, is left out."""
        if self._logger is not None:
            metrics = {k: v for k, v in row.items() if k != "step" and not math.isnan(v)}
            self._logger.log_metrics(metrics, step=int(row["step"]))

    def _close_logger(self, *, failed: bool) -> None:
        if self._logger is None:
            return
        experiment = self._logger.experiment
        if self.options.logger == "wandb":
            experiment.finish(exit_code=1 if failed else self.exit_code)
        elif hasattr(experiment, "close"):
            experiment.close()

    # Checkpoints.

    def _save(self) -> None:
        """Write a checkpoint; at the end of the run, the newest policy beside it."""
        state = {
            "format": _FORMAT,
            "recipe": self._recipe,
            "options": to_json(self.options),
            "versions": _versions(),
            "id": self._id,
            "step": self.step,
            "elapsed_s": self._elapsed_before_s + self._collector.statistics().elapsed_s,
            "rows": len(self._metrics.rows),
            "random_states": _random_states(),
            "parts": {name: dict(part.state_dict()) for name, part in self._parts.items()},
        }
        lost = state["parts"]["collector"]["why_environments_are_lost"]
        if lost and not self._told_of_loss:
            self._told_of_loss = True
            self.say(f"a run that is resumed from here begins new episodes: {lost}")
        self._metrics.sync()
        self._evaluations.sync()
        self._checkpoints.save(self.step, state)
        policy = self._collector.policy.state_dict()
        on_cpu = {name: value.cpu() for name, value in policy.items()}
        save_atomically(self.output_dir / "policy.pt", on_cpu)

    def _resume(self) -> int:
        """Load the newest checkpoint; returns the rows of metrics before it."""
        config = json.loads((self.output_dir / "config.json").read_text())
        self._wandb_names = config.get("wandb")
        state = self._checkpoints.load()
        if state is None:
            self.say(f"there is no checkpoint in {self.output_dir} yet: the run begins anew")
            self._id = config.get("id", self._id)
            return 0
        self._check(state)
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        _set_random_states(state["random_states"])
        self._id = state["id"]
        self._elapsed_before_s = state["elapsed_s"]
        self._last_speed = (state["step"], 0.0)
        self.say(
            f"resumed from {self._checkpoints.paths()[-1]}: {state['step']:,} of "
            f"{self._total_frames:,} steps are done"
        )
        return state["rows"]

    def _check(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint that this run could not go on from."""
        where = f"the checkpoint in {self._checkpoints.directory}"
        if state.get("format") != _FORMAT or state.get("recipe") != self._recipe:
            raise RecipeError(
                f"{where} is of recipe {state.get('recipe')!r}, format {state.get('format')}; this "
                f"is {self._recipe!r}, format {_FORMAT}: resume with what made it"
            )
        changed = differences(state["options"], self.options)
        if changed:
            raise RecipeError(f"{where} is of another configuration: {'; '.join(changed)}")
        if state["parts"].keys() != self._parts.keys():
            raise RecipeError(
                f"{where} holds {', '.join(state['parts'])}; this run has {', '.join(self._parts)}"
            )
        now = _versions()
        other = [
            f"{name} was {state['versions'][name]} and is {now.get(name)}"
            for name in _PACKAGES
            if name in state["versions"] and state["versions"][name] != now.get(name)
        ]
        if other and not self.options.ignore_versions:
            raise RecipeError(
                f"{where} was made with other versions: {'; '.join(other)}. Install those, or pass "
                "--ignore-versions to go on without being equal bit for bit"
            )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.copy()), *rest],
        "python": random.getstate(),
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
