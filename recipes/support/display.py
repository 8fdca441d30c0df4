"""The metrics of a run while it goes on: kept up to date on a terminal, now and then in a log."""

from __future__ import annotations

import math
import sys
import time
from typing import IO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from support.metrics import Row
from support.outputs import Output

__all__ = ["Display"]


class Display:
    """Shows the newest row of metrics: below a bar on a terminal, as a few lines elsewhere.

    Args:
        total_steps: environment steps of the whole run.
        interval_s: least time between two rows where there is no terminal.
        quiet: show nothing.
    """

    def __init__(self, total_steps: int, interval_s: float = 10.0, *, quiet: bool = False) -> None:
        self._total_steps = total_steps
        self._interval_s = interval_s
        self._shown_s = -math.inf
        self._console = Console(file=cast(IO[str], Output(sys.stdout)), quiet=quiet)
        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=3600,  # rows may be far more than 30 s apart
        )
        self._task = self._progress.add_task("", total=total_steps)
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            self._live = Live(self._progress, console=self._console, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, row: Row, *, at_once: bool = False) -> None:
        """Show a row of metrics; where there is no terminal, not too often unless at once."""
        lines = describe(row)
        if self._live is not None:
            self._progress.update(self._task, completed=row["step"])
            self._live.update(Group(self._progress, *(Text("  " + line) for line in lines)))
        elif at_once or time.monotonic() - self._shown_s >= self._interval_s:
            self._shown_s = time.monotonic()
            done = row["step"] / self._total_steps
            self.say(f"{row['step']:,} steps ({done:.0%})")
            for line in lines:
                self.say("  " + line)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe(row: Row) -> list[str]:
    """The metrics of a row, as lines for people."""
    return [line for line in (_episodes(row), _learning(row), _speed(row), _time(row)) if line]


def _episodes(row: Row) -> str:
    if not row.get("episode/count"):
        return "episodes   none has ended yet"
    return (
        f"episodes   return {row['episode/return_mean']:.1f} "
        f"({row['episode/return_min']:.1f} to {row['episode/return_max']:.1f}), "
        f"length {row['episode/length_mean']:,.0f} "
        f"({row['episode/length_min']:,.0f} to {row['episode/length_max']:,.0f}), "
        f"{row['episode/count']:,.0f} ended"
    )


def _learning(row: Row) -> str:
    named = {"loss/": "loss", "policy/": "", "optim/": ""}
    parts = []
    for prefix, title in named.items():
        for name, value in row.items():
            if name.startswith(prefix) and not math.isnan(value):
                label = f"{title} {name.removeprefix(prefix)}".strip().replace("_", " ")
                parts.append(f"{label} {value:.3g}")
    return "learning   " + ", ".join(parts) if parts else ""


def _speed(row: Row) -> str:
    return (
        f"speed      {row['speed/steps_per_second']:,.0f} steps/s now, "
        f"{row['speed/steps_per_second_overall']:,.0f} overall; "
        f"batches of {row['time/actor_batch_size']:.1f} observations"
    )


def _time(row: Row) -> str:
    return (
        f"time       executors {row['time/executors_stepping']:.0%} stepping, "
        f"{row['time/executors_waiting_for_action']:.0%} waiting for actions, "
        f"{row['time/executors_waiting_for_round']:.0%} for rounds; "
        f"actors {row['time/actors_inferring']:.0%} inferring, "
        f"{row['time/actors_waiting']:.0%} waiting; "
        f"learner {row['time/learner_learning']:.0%} learning, "
        f"{row['time/learner_waiting']:.0%} waiting"
    )
