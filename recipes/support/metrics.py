"""The rows of metrics.csv and evaluations.csv, and the picture that is drawn from them.

Every row maps metric names to numbers; ``"step"`` is the environment step it belongs to. What a
name means is said in recipes/README.md. Those of the groups ``speed`` and ``time`` are measured by
the clock; all others are the same, bit for bit, in every run with the same options.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor

from support.checkpoints import write_atomically
from support.errors import RecipeError, quoted
from torchrl_hts import EpisodeReturns, Evaluation, Statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Row",
    "Table",
    "curve",
    "draw_curve",
    "episode_metrics",
    "evaluation_metrics",
    "learning_metrics",
    "time_metrics",
    "unlearned_metrics",
]

Row = dict[str, float]


class Table:
    """A CSV file of rows that all have the same columns.

    Args:
        path: the file; it is begun anew unless rows are kept.
        keep: how many of the rows that are in the file are kept: those of the run before it was
            resumed.

    Raises:
        RecipeError: if there are fewer that are whole.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        content = path.read_bytes() if keep and path.exists() else b""
        lines = content.splitlines(keepends=True)[: keep + 1]
        try:
            whole = [line.decode() for line in lines if line.endswith(b"\n")]
            self.rows: list[Row] = [
                {name: float(value) for name, value in row.items()}
                for row in csv.DictReader(whole, strict=True)
            ]
        except (ValueError, TypeError, csv.Error) as error:
            raise RecipeError(
                f"{path} is damaged ({error}): put the file back as it was"
            ) from error
        if len(self.rows) < keep:
            raise RecipeError(
                f"{path} has {len(self.rows)} rows, and the checkpoint is of {keep}: put the file "
                "back as it was"
            )
        write_atomically(path, b"".join(lines))
        self._path = path
        self._file = path.open("a", newline="")

    def append(self, row: Row) -> None:
        """Add a row, to the file as well."""
        writer = csv.DictWriter(self._file, list(row))
        if self.rows and [*row] != [*self.rows[0]]:
            differ = ", ".join(sorted({*row} ^ {*self.rows[0]})) or "their order"
            raise RecipeError(
                f"all rows of {self._path} must have the same metrics, in one order, and these "
                f"differ: {differ}. Give NaN where there is none"
            )
        with self._writing():
            if not self.rows:
                writer.writeheader()
            writer.writerow(row)
            self._file.flush()
        self.rows.append(row)

    def sync(self) -> None:
        """Have the file on disk before a checkpoint that counts on its rows."""
        with self._writing():
            os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecipeError(
                f"{self._path} can't be written: {error.strerror}. Checkpoints are whole: make "
                f"room, then go on with --resume {quoted(self._path.parent)}"
            ) from error

    def close(self) -> None:
        """Close the file.

        Raises:
            RecipeError: if what is left of a row can't be written.
        """
        with self._writing():
            self._file.close()


def episode_metrics(returns: EpisodeReturns) -> Row:
    """Of the last 100 training episodes; NaN before the first has ended."""
    return {
        "episode/count": returns.count,
        "episode/return_mean": returns.mean,
        "episode/return_min": returns.min,
        "episode/return_max": returns.max,
        "episode/length_mean": returns.mean_length,
        "episode/length_min": returns.min_length,
        "episode/length_max": returns.max_length,
    }


def evaluation_metrics(evaluation: Evaluation) -> Row:
    """Of the episodes of one evaluation."""
    return {
        "step": evaluation.step,
        "evaluation/return_mean": fmean(evaluation.returns),
        "evaluation/return_min": min(evaluation.returns),
        "evaluation/return_max": max(evaluation.returns),
        "evaluation/length_mean": fmean(evaluation.lengths),
        "evaluation/episodes": len(evaluation.returns),
    }


_LEARNING = {
    "loss_objective": "loss/objective",
    "loss_critic": "loss/critic",
    "loss_entropy": "loss/entropy",
    "loss_actor": "loss/actor",
    "loss_qvalue": "loss/qvalue",
    "loss_alpha": "loss/alpha",
    "alpha": "policy/alpha",
    "entropy": "policy/entropy",
    "clip_fraction": "policy/clip_fraction",
    "kl_approx": "policy/kl",
}


def learning_metrics(
    losses: Sequence[TensorDictBase],
    gradient_norm: Tensor,
    learning_rate: float,
    mean: Callable[[Sequence[Tensor]], Tensor],
) -> Row:
    """Of one optimizer step, by what TorchRL's loss modules return.

    Args:
        losses: for each part of the minibatch.
        gradient_norm: of all of them.
        learning_rate: of the step.
        mean: over a vector for each part; `World.mean`.
    """
    named = {key: name for key, name in _LEARNING.items() if losses[0].get(key, None) is not None}
    # In float64, which holds them exactly.
    vectors = [
        torch.stack([part.get(key).detach().double().reshape(()) for key in named])
        for part in losses
    ]
    return {
        **dict(zip(named.values(), mean(vectors).tolist(), strict=True)),
        "optim/gradient_norm": gradient_norm.item(),
        "optim/learning_rate": learning_rate,
    }


def unlearned_metrics(keys: Collection[str]) -> Row:
    """The same, all NaN, of a round without an optimizer step.

    Args:
        keys: of what the loss module returns.
    """
    named = [name for key, name in _LEARNING.items() if key in keys]
    return dict.fromkeys([*named, "optim/gradient_norm", "optim/learning_rate"], math.nan)


def time_metrics(now: Statistics, before: tuple[int, float], elapsed_before_s: float) -> Row:
    """Speed, and where the time went.

    Args:
        now: the collector's statistics.
        before: frames and elapsed seconds of the row before.
        elapsed_before_s: seconds that the run had taken before it was resumed.
    """
    frames, seconds = before
    passed = now.elapsed_s - seconds
    return {
        "speed/steps_per_second": (now.frames - frames) / passed if passed > 0 else math.nan,
        "speed/steps_per_second_overall": now.frames_per_second,
        "time/elapsed_s": elapsed_before_s + now.elapsed_s,
        "time/executors_stepping": now.executor_busy_share,
        "time/executors_waiting_for_action": now.executor_action_waiting_share,
        "time/executors_waiting_for_round": now.executor_round_waiting_share,
        "time/actors_inferring": now.actor_busy_share,
        "time/actors_waiting": 1 - now.actor_busy_share,
        "time/actor_batch_size": now.mean_actor_batch_size,
        "time/learner_learning": 1 - now.learner_waiting_share,
        "time/learner_waiting": now.learner_waiting_share,
    }


def draw_curve(path: Path, title: str, rows: Sequence[Row], evaluations: Sequence[Row]) -> None:
    """Draw returns against steps."""
    picture = io.BytesIO()
    curve(title, rows, evaluations).savefig(picture, dpi=150, format=path.suffix[1:])
    write_atomically(path, picture.getbuffer())


def curve(title: str, rows: Sequence[Row], evaluations: Sequence[Row]) -> Figure:
    """Returns against steps, as far as there are any."""
    from matplotlib.figure import Figure  # half a second that the start does without

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    drawn = (
        ("training, mean of the last 100 episodes", rows, "episode/return_mean", ""),
        ("evaluation", evaluations, "evaluation/return_mean", "o"),
    )
    values: set[float] = set()
    for label, table, name, marker in drawn:
        points = [
            (row["step"], row[name]) for row in table if math.isfinite(row.get(name, math.nan))
        ]
        if points:
            alone = "o" if len(points) == 1 else marker  # a line of one point is not seen
            axes.plot(*zip(*points, strict=True), marker=alone, markersize=3, label=label)
            values.update(value for _, value in points)
    axes.set(xlabel="environment steps", ylabel="episode return", title=title)
    axes.grid(alpha=0.3)
    axes.set_xlim(0, 1.05 * max((row["step"] for row in [*rows, *evaluations]), default=1.0))
    if len(values) == 1:  # or the axis would tell of parts of a thousandth
        (value,) = values
        axes.set_ylim(*sorted((0.0, 1.2 * value)) if value else (-1.0, 1.0))
    if values:
        axes.legend()
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no episode has ended yet", ha="center", transform=axes.transAxes)
    return figure
