"""A collector's statistics as a table for people: ten lines of at most 100 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchrl_hts._reports.wording import bytes_text, fitted, plural, time_text

if TYPE_CHECKING:
    from torchrl_hts._reports.statistics import Statistics

__all__ = ["table"]

_WIDTH = 100
_NAMES = 13  # width of the first column


def table(found: Statistics) -> str:
    """One line each for what came, where the time went, and what it took."""
    lines = {
        "collected": f"{plural(found.frames, 'frame')} in {plural(found.rounds, 'round')}; "
        f"{plural(found.episodes, 'episode')} ended",
        "speed": f"{found.frames_per_second:,.0f} frames/s over {time_text(found.elapsed_s)}",
        "learner": f"{found.learner_waiting_share:.0%} waiting for a batch",
        _of(found, "executor"): f"{found.executor_busy_share:.0%} stepping, "
        f"{found.executor_action_waiting_share:.0%} waiting for an action, "
        f"{found.executor_round_waiting_share:.0%} for a round to open",
        _of(found, "actor"): f"{found.actor_busy_share:.0%} inferring, "
        f"{found.actor_observation_waiting_share:.0%} waiting for an observation, "
        f"{found.actor_gathering_share:.0%} for more of them",
        "passes": f"{found.actor_batches:,} of {found.mean_actor_batch_size:.1f} rows on average; "
        f"{found.padding_share:.0%} of the rows run were padding",
        "batch sizes": str(found.invariant_sizes),
        "steps": _steps(found.step_times),
        "memory": _memory(found),
        "replaced": f"{plural(found.executor_restarts, 'executor')}, "
        f"{plural(found.actor_restarts, 'actor')}",
    }
    return "\n".join(fitted(f"{name:<{_NAMES}} {text}", _WIDTH) for name, text in lines.items())


def _of(found: Statistics, kind: str) -> str:
    return plural(sum(name.startswith(kind) for name in found.workers), kind)


def _steps(times: Mapping[float, int]) -> str:
    """In less than which time a half, nearly all and all were done: bounds of buckets."""
    if not times:
        return "none yet"
    marks: dict[str, str] = {}
    total, sofar = sum(times.values()), 0
    for bound, number in sorted(times.items()):
        sofar += number
        for share, name in ((0.5, "half"), (0.99, "99%"), (1.0, "all")):
            if sofar >= share * total:
                marks.setdefault(name, f"{name} in less than {time_text(bound)}")
    return ", ".join(marks.values())


def _memory(found: Statistics) -> str:
    shared = f"{bytes_text(found.shared_bytes)} shared"
    own = [
        (name.split()[0], worker.private_bytes)
        for name, worker in found.workers.items()
        if worker.private_bytes is not None
    ]
    if found.learner_private_bytes is not None:
        own.append(("learner", found.learner_private_bytes))
    if not own:
        return f"{shared}; each process's own by statistics(memory=True)"
    kinds = list(dict.fromkeys(kind for kind, _ in own))
    sums = {kind: sum(size for each, size in own if each == kind) for kind in kinds}
    return f"{shared}; their own: " + ", ".join(
        f"{kind if kind == 'learner' else f'{kind}s'} {bytes_text(size)}"
        for kind, size in sums.items()
    )
