"""Figure 1 of Liu et al. (NeurIPS 2020) from a real run.

A row for the learner, each actor and each environment; time goes to the right, a colour for each
round. Boxes are updates, forward passes (with their number of rows) and steps; what is left white
is waiting for an action, what is hatched waiting for a round to open. Steps and passes that are
too short to be seen are merged into runs, which a note below the axis says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from torchrl_hts._reports.wording import time_text
from torchrl_hts._rounds.event_rings import Activity
from torchrl_hts._rounds.shared_memory import Array

if TYPE_CHECKING:
    from torchrl_hts._reports.timeline import Timeline

__all__ = ["Box", "boxes", "draw", "waits_for_rounds"]

_COLOURS = ("#7fb3d5", "#f5b971", "#8fcb9b", "#d89ac4", "#e6d36b", "#9fa8da")
_WAITING: dict[str, Any] = {"facecolor": "#d5d8dc", "edgecolor": "w", "hatch": "////"}
# Of the width:
_SHARE_PER_LETTER = 0.0085  # a label is written where there is room for it
_VISIBLE = 1 / 600  # boxes that are mostly narrower are merged
_LEAST = 1 / 1000  # no box is drawn narrower
_APART = 1 / 300  # boxes of a run are no farther apart
_MOST_PIXELS = 65_000  # of a side: matplotlib draws no more

Span = tuple[int, int]  # from, to; in nanoseconds


@dataclass(frozen=True)
class Box:
    """What is drawn as one box: an event, or a run of them; times in nanoseconds."""

    began: int
    ended: int
    round: int
    rows: int
    events: int = 1


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


def boxes(events: Array, rounds: Array, apart: int | None) -> list[Box]:
    """What is drawn of one worker, or of one environment.

    Args:
        events: one after the other.
        rounds: that they are of.
        apart: merge those of one round that are at most so many nanoseconds apart; None: no two.
    """
    found: list[Box] = []
    columns = (events["began"], events["ended"], rounds, events["rows"])
    for began, ended, round_, rows in zip(*(c.tolist() for c in columns), strict=True):
        last = found[-1] if found else None
        if last and apart is not None and last.round == round_ and began - last.ended <= apart:
            rows, number = last.rows + rows, last.events + 1
            found[-1] = Box(last.began, ended, round_, rows, number)
        else:
            found.append(Box(began, ended, round_, rows))
    return found


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
    actors = [name for name in timeline.events if name.startswith("actor")]
    kinds = {
        "updates": {"learner": _spans(timeline, "learner", Activity.LEARN)},
        "passes": {name: _spans(timeline, name, Activity.INFER) for name in actors},
        "steps": {f"environment {env}": steps[steps["env"] == env] for env in envs},
    }
    names = [name for rows in kinds.values() for name in rows]
    zero, end = _extent([events for rows in kinds.values() for events in rows.values()])
    merged = [
        kind  # of which there is more than one a round
        for kind in ("passes", "steps")
        if _are_too_short([*kinds[kind].values()], end - zero)
    ]
    apart = int((end - zero) * _APART)

    height = 1.4 + 0.24 * len(names)  # inches
    figure = Figure(figsize=(8.4, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, (end - zero) / 1e6)
    rounds: set[int] = set()
    for kind, rows in kinds.items():
        for name, events in rows.items():
            found = boxes(events, timeline.rounds(events), apart if kind in merged else None)
            rounds.update(box.round for box in found)
            _draw_row(axes, names.index(name), found, zero, end)
            if kind != "steps":
                _label(axes, names.index(name), found, zero, end)
    waits = {
        names.index(f"environment {env}"): [s for s in spans if s[1] - s[0] > (end - zero) * _LEAST]
        for env, spans in waits_for_rounds(timeline).items()
    }
    for y, spans in waits.items():
        axes.broken_barh(_bars(spans, zero), (y - 0.4, 0.8), **_WAITING)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(f"ms\n{_note(merged, apart)}" if merged else "ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    key = [
        Patch(facecolor=_COLOURS[round_ % len(_COLOURS)], label=f"round {round_}")
        for round_ in sorted(rounds)
    ]
    if any(waits.values()):
        key.append(Patch(**_WAITING, label="waits for its round"))
    if key:
        axes.legend(handles=key, ncols=7, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(file, dpi=min(150, _MOST_PIXELS / height))


def _draw_row(axes: Any, y: int, found: list[Box], zero: int, end: int) -> None:
    least = int((end - zero) * _LEAST)
    bars = _bars([(box.began, max(box.ended, box.began + least)) for box in found], zero)
    colours = [_COLOURS[box.round % len(_COLOURS)] for box in found]
    # An edge would hide a box that is hardly wider.
    edges = [0.3 if box.ended - box.began > 3 * least else 0.0 for box in found]
    axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=colours, edgecolor="w", linewidth=edges)


def _label(axes: Any, y: int, found: list[Box], zero: int, end: int) -> None:
    """Write onto the boxes which updates they are, or how many rows passes had."""
    for box in found:
        name = f"update {box.round}" if y == 0 else str(box.rows)
        if box.events > 1:
            name = f"{box.events} passes, {box.rows} rows"
        if box.ended - box.began > (end - zero) * _SHARE_PER_LETTER * len(name):
            at = ((box.began + box.ended) / 2e6 - zero / 1e6, y)
            axes.annotate(name, at, ha="center", va="center", fontsize=7)


def _note(merged: list[str], apart: int) -> str:
    return (
        f"{' and '.join(merged)} are too short to be seen: those of one round that are at most "
        f"{time_text(apart / 1e9)} apart are drawn as one box"
    )


def _extent(rows: list[Array]) -> Span:
    """From when to when anything happened."""
    drawn = [events for events in rows if len(events)]
    zero = min((int(events["began"].min()) for events in drawn), default=0)
    return zero, max((int(events["ended"].max()) for events in drawn), default=zero + 1)


def _are_too_short(rows: list[Array], width: int) -> bool:
    """Whether most events would be too narrow to be seen."""
    times = [time for events in rows for time in (events["ended"] - events["began"]).tolist()]
    return bool(times) and median(times) < width * _VISIBLE


def _spans(timeline: Timeline, worker: str, activity: Activity) -> Array:
    events = timeline.events[worker]
    chosen: Array = events[events["activity"] == activity]
    return chosen


def _bars(spans: Iterable[Span], zero: int) -> list[tuple[float, float]]:
    """Where boxes begin and how long they are, in milliseconds."""
    return [((began - zero) / 1e6, (ended - began) / 1e6) for began, ended in spans]
