"""Figure 1 of Liu et al. (NeurIPS 2020) from a real run.

A row for the learner, each actor and each environment; time goes to the right, a colour for each
round. Boxes are updates, forward passes (with their number of rows) and steps; what is left white
is waiting for an action, what is hatched waiting for a round to open.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_hts.recording import Activity
from torchrl_hts.storage import Array

if TYPE_CHECKING:
    from torchrl_hts.timeline import Timeline

__all__ = ["draw", "waits_for_rounds"]

_COLOURS = ("#7fb3d5", "#f5b971", "#8fcb9b", "#d89ac4", "#e6d36b", "#9fa8da")
_WAITING: dict[str, Any] = {"facecolor": "#d5d8dc", "edgecolor": "w", "hatch": "////"}
_SHARE_PER_LETTER = 0.0055  # of the width: a label is written where there is room for it

Span = tuple[int, int]  # from, to; in nanoseconds


def waits_for_rounds(timeline: Timeline) -> dict[int, list[Span]]:
    """When each environment had finished a round and its next one was not open yet."""
    learned = timeline.of(Activity.LEARN)
    opened = dict(
        zip((learned["number"] + timeline.lag + 1).tolist(), learned["ended"].tolist(), strict=True)
    )
    alpha = timeline.sync_interval
    steps = timeline.of(Activity.STEP)
    begun = {(step["env"], step["number"] // alpha) for step in steps[steps["number"] % alpha == 0]}
    waits: dict[int, list[Span]] = {}
    for step in steps[(steps["number"] + 1) % alpha == 0]:
        env, round_ = step["env"], (step["number"] + 1) // alpha
        if (env, round_) in begun and opened.get(round_, 0) > step["ended"]:
            waits.setdefault(int(env), []).append((int(step["ended"]), opened[round_]))
    return waits


def draw(timeline: Timeline, file: Path) -> None:
    """Write the picture.

    Raises:
        ImportError: if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            f"a picture ({file.name}) needs matplotlib: pip install 'torchrl_hts[recipes]', or "
            "write a trace (.json)"
        ) from error
    steps = timeline.of(Activity.STEP)
    envs = sorted(set(steps["env"].tolist()))
    workers = [("learner", _spans(timeline, "learner", Activity.LEARN))]
    workers += [
        (name, _spans(timeline, name, Activity.INFER))
        for name in timeline.events
        if name.startswith("actor")
    ]
    rows = workers + [(f"environment {env}", steps[steps["env"] == env]) for env in envs]
    drawn = [events for _, events in rows if len(events)]
    zero = min((int(events["began"].min()) for events in drawn), default=0)
    end = max((int(events["ended"].max()) for events in drawn), default=zero + 1)

    figure = Figure(figsize=(14, 1.6 + 0.26 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    rounds: set[int] = set()
    for y, (_, events) in enumerate(rows):
        of_each = timeline.rounds(events).tolist()
        rounds.update(of_each)
        bars = _bars(zip(events["began"].tolist(), events["ended"].tolist(), strict=True), zero)
        colours = [_COLOURS[round_ % len(_COLOURS)] for round_ in of_each]
        axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=colours, edgecolor="w", linewidth=0.3)
        if y < len(workers):
            names = [f"update {r}" for r in of_each] if y == 0 else map(str, events["rows"])
            for (began, duration), name in zip(bars, names, strict=True):
                if duration * 1e6 > (end - zero) * _SHARE_PER_LETTER * len(name):
                    at = (began + duration / 2, y)
                    axes.annotate(name, at, ha="center", va="center", fontsize=7)
    for env, spans in waits_for_rounds(timeline).items():
        y = len(workers) + envs.index(env)
        axes.broken_barh(_bars(spans, zero), (y - 0.4, 0.8), **_WAITING)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, (end - zero) / 1e6)
    axes.set_xlabel("ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    key = [
        Patch(facecolor=_COLOURS[round_ % len(_COLOURS)], label=f"round {round_}")
        for round_ in sorted(rounds)
    ]
    key.append(Patch(**_WAITING, label="waits for its round"))
    axes.legend(handles=key, ncols=8, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(file, dpi=150)


def _spans(timeline: Timeline, worker: str, activity: Activity) -> Array:
    events = timeline.events[worker]
    chosen: Array = events[events["activity"] == activity]
    return chosen


def _bars(spans: Iterable[Span], zero: int) -> list[tuple[float, float]]:
    """Where boxes begin and how long they are, in milliseconds."""
    return [((began - zero) / 1e6, (ended - began) / 1e6) for began, ended in spans]
