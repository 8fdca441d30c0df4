"""What the recipes share: flags from a dataclass, a live display, a metrics file and a picture."""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

__all__ = ["Metrics", "RunLog", "option", "parse_config"]

Config = TypeVar("Config")


def option(default: Any, explanation: str) -> Any:
    """A field of a configuration dataclass, with the line that ``--help`` shows for it."""
    return field(default=default, metadata={"help": explanation})


def parse_config(
    config_class: type[Config], description: str | None, arguments: Sequence[str] | None = None
) -> Config:
    """Makes a configuration from command-line flags, one for each field of a dataclass.

    ``num_envs: int = option(16, "...")`` becomes ``--num-envs``; a bool also gets ``--no-...``.
    Fields of type ``T | None`` keep None unless they are given.

    Args:
        config_class: a dataclass whose fields are made with `option`.
        description: the text above the flags in ``--help``.
        arguments: by default those of the command line.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=_HelpFormatter)
    hints = typing.get_type_hints(config_class)
    for entry in fields(config_class):  # type: ignore[arg-type]
        flag = "--" + entry.name.replace("_", "-")
        if entry.default is MISSING:
            raise TypeError(f"{config_class.__name__}.{entry.name} has no default: use option()")
        settings: dict[str, Any] = {
            "default": entry.default,
            "help": entry.metadata["help"].replace("%", "%%"),
        }
        if hints[entry.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
        else:
            kind = _without_none(hints[entry.name])
            parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), **settings)
    return config_class(**vars(parser.parse_args(arguments)))


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as it is written."""


def _without_none(hint: Any) -> Any:
    """``T`` for ``T | None``, anything else as it is."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return hint


@dataclass(frozen=True)
class Metrics:
    """One row of the metrics file."""

    frames: int
    elapsed_s: float
    frames_per_second: float  # over the whole run
    episodes: int
    train_return: float  # mean over the last 100 episodes; NaN before the first has ended
    learner_waiting_share: float  # of the time, the learner waited for a batch
    loss: float
    entropy: float
    learning_rate: float
    evaluation_return: float  # NaN in rows without an evaluation


class RunLog:
    """Shows a run's progress and keeps it: ``config.json``, ``metrics.csv``, ``curve.png``.

    On a terminal there is a bar that is kept up to date; elsewhere, a line every few seconds.
    Use it as a context, so that the files are complete however the run ends.

    Args:
        output_dir: where the files go; made if missing.
        config: the run's configuration, a dataclass.
        total_frames: frames of the whole run.
        title: heading of the curve.
        line_interval_s: least time between two lines where there is no terminal.
    """

    def __init__(
        self,
        output_dir: Path,
        config: Any,
        total_frames: int,
        title: str,
        line_interval_s: float = 5.0,
    ) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(asdict(config), indent=2, default=str)
        (output_dir / "config.json").write_text(settings + "\n")
        self.output_dir = output_dir
        self._title = title
        self._line_interval_s = line_interval_s
        self._last_line_s = -math.inf
        self._rows: list[Metrics] = []
        self._file: TextIO = (output_dir / "metrics.csv").open("w", newline="")
        self._writer = csv.DictWriter(self._file, [entry.name for entry in fields(Metrics)])
        self._writer.writeheader()
        self._console = Console()
        self._progress = Progress(
            BarColumn(bar_width=16),
            TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(),
            _MetricsColumn(table_column=Column(no_wrap=True)),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total_frames, line="")

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        self._file.close()
        if self._rows:
            self._draw_curve()

    def add(self, metrics: Metrics) -> None:
        """Takes in one row: writes it, shows it, and keeps it for the curve."""
        self._rows.append(metrics)
        self._writer.writerow(asdict(metrics))
        self._file.flush()
        line = (
            f"return {metrics.train_return:.1f}  {metrics.frames_per_second:,.0f} steps/s  "
            f"learner waited {metrics.learner_waiting_share:.0%}"
        )
        self._progress.update(self._task, completed=metrics.frames, line=line)
        now = time.monotonic()
        evaluated = not math.isnan(metrics.evaluation_return)
        if evaluated:
            self.say(f"{metrics.frames:,} steps: evaluation return {metrics.evaluation_return:.1f}")
        if self._progress.disable and now - self._last_line_s >= self._line_interval_s:
            self.say(f"{metrics.frames:,} steps: {line}")
            self._last_line_s = now

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, highlight=False, soft_wrap=True)
        sys.stdout.flush()

    def _draw_curve(self) -> None:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(
            [row.frames for row in self._rows],
            [row.train_return for row in self._rows],
            label="training, mean of the last 100 episodes",
        )
        evaluated = [row for row in self._rows if not math.isnan(row.evaluation_return)]
        if evaluated:
            axes.plot(
                [row.frames for row in evaluated],
                [row.evaluation_return for row in evaluated],
                "o-",
                label="evaluation, greedy",
            )
        axes.set(xlabel="environment steps", ylabel="episode return", title=self._title)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.output_dir / "curve.png", dpi=150)


class _MetricsColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["line"])
