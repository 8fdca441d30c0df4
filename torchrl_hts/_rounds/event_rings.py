"""Recording who did what when, as fixed-size records in the shared memory.

Every worker and the learner has a ring of its own, which it alone writes; a record is 32 bytes,
and making one takes some 0.4 microseconds. The rings are part of the block of memory only if they
were asked for. ``_reports/timeline.py`` makes a trace and a picture of what they hold.

Times are nanoseconds of `time.perf_counter_ns`, a clock that all processes of a machine share.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

import numpy as np

from torchrl_hts._rounds.shared_memory import Array, SharedMemory

__all__ = ["RECORD", "Activity", "Record", "read_ring", "recorder"]


class Activity(IntEnum):
    """What somebody did between two moments; each says which words of the record it fills."""

    STEP = 0  # an executor stepped `env`; number: the steps that it has completed before
    RESET = 1  # an executor began or restored `env`; number: the round that it goes on with
    ACTION_WAIT = 2  # an executor had nothing to do until an action came
    ROUND_WAIT = 3  # an executor had nothing to do until a round opened; number: the round
    INFER = 4  # an actor answered `rows` observations in a pass of `padded`; number: the round
    OBSERVATION_WAIT = 5  # an actor had nothing to do, or waited for a larger batch
    LEARN = 6  # the learner had the batch of a round; number: the round
    BATCH_WAIT = 7  # the learner waited until a round was full; number: the round


# began, ended, number, activity, env, rows, padded
RECORD = np.dtype(
    [
        ("began", "<i8"),
        ("ended", "<i8"),
        ("number", "<i8"),
        ("activity", "<u2"),
        ("env", "<u2"),
        ("rows", "<u2"),
        ("padded", "<u2"),
    ]
)
_PACK = struct.Struct("<qqqHHHH")

Record = Callable[..., None]


def recorder(memory: SharedMemory, worker: int) -> Record | None:
    """A function that appends a record to a ring, the oldest giving way; None without rings.

    Args:
        memory: the shared memory.
        worker: whose ring: the worker's row of counters, or the number of workers for the learner.

    Returns:
        ``record(activity, began, ended, number=0, env=0, rows=0, padded=0)``.

    Example:
        >>> from torchrl_hts._rounds.shared_memory import Layout
        >>> fd = SharedMemory.create_fd()
        >>> memory = SharedMemory(fd, Layout(1, 1, 0, 1, (), (), timeline_events=2))
        >>> record = recorder(memory, 0)
        >>> for at in range(3):
        ...     record(Activity.STEP, at, at + 1, number=at)
        >>> read_ring(memory, 0)["number"].tolist()
        [1, 2]
    """
    if not memory.layout.timeline_events:
        return None
    length = memory.layout.timeline_events + 1
    count, ring = memory.ring(worker)
    pack, size = _PACK.pack_into, _PACK.size
    written = count[0]  # not 0 in a process that takes the place of another

    def record(
        activity: Activity,
        began: int,
        ended: int,
        number: int = 0,
        env: int = 0,
        rows: int = 0,
        padded: int = 0,
    ) -> None:
        nonlocal written
        pack(ring, written % length * size, began, ended, number, activity, env, rows, padded)
        written += 1
        count[0] = written  # after the record: a reader takes what is counted

    return record


def read_ring(memory: SharedMemory, worker: int) -> Array:
    """A copy of what a ring holds, oldest first; may be called while it is written.

    Returns:
        An array of `RECORD`.
    """
    if not memory.layout.timeline_events:
        return np.empty(0, RECORD)
    count, ring = memory.ring(worker)
    end = count[0]
    length = memory.layout.timeline_events + 1
    records = np.frombuffer(bytes(ring[: min(end, length) * RECORD.itemsize]), RECORD)
    first = max(0, count[0] + 1 - length)  # what was overwritten meanwhile is not returned
    return records[np.arange(first, end) % length]
