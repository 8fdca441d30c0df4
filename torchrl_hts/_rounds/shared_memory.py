"""Shared memory: where every word and every array of a collector lies.

One anonymous block of memory, known by a file descriptor alone, holds

- the words of the schedule (``schedule.py``), the counters of the workers (``Counter``) and their
  histograms, and, if a timeline is asked for, a ring of records for each (``event_rings.py``);
- ``lag + 1`` slots, each an array ``[num_envs, sync_interval, *shape]`` per field, and the bytes
  of the behaviour parameters that fill it.

The block is allocated once. It has no name, so nothing is left behind however a process ends, and
it isn't bounded by the size of /dev/shm. This module knows numpy only; ``slots.py`` lays tensors
over the same memory.

Axes: N environments, T = alpha steps, S = lag + 1 slots.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrl_hts._processes.limits import no_room
from torchrl_hts._processes.linux import anonymous_memory, is_anonymous_memory
from torchrl_hts._processes.standard_descriptors import fill_standard_descriptors
from torchrl_hts._rounds.keys import Key
from torchrl_hts._rounds.schedule import Schedule

__all__ = ["RECORD_BYTES", "Array", "Counter", "Field", "Layout", "SharedMemory"]

Array = npt.NDArray[Any]

RECORD_BYTES = 32  # of a timeline
_DURATIONS = 64  # buckets of a histogram of times: a time has so many bits, in nanoseconds
_ALIGNMENT = 64  # of every array: results may depend on the alignment of what they are made from


class Counter(IntEnum):
    """What a worker counts; one row of 64-bit words per worker, written by it alone."""

    EVENTS = 0  # executor: environment steps; actor: batches
    ROWS = 1  # actor: rows inferred
    PADDED_ROWS = 2  # actor: rows run, padding included
    BUSY_NS = 3  # executor: stepping and resetting; actor: reading rows, inferring, writing rows
    WAITING_NS = 4  # asleep; of an executor: while an action was to come
    RESETS = 5  # executor: episodes begun
    CPU_NS = 6  # processor time of all its threads since the first run began; no looking for words
    ROUND_WAITING_NS = 7  # executor: asleep while no round was open for any of its environments
    AT = 8  # executor: 1 + the environment, actor: 1 + the round that it works for; 0: none
    GATHERING_NS = 9  # actor: of WAITING_NS, with rows in hand, until there were more


@dataclass(frozen=True)
class Field:
    """One array of a slot.

    Attributes:
        key: the nested key of the batch, such as ``("next", "reward")``.
        shape: shape of one transition's value.
        dtype: numpy's name of the data type, or ``"bfloat16"``.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """The numpy data type that holds it; bfloat16, which numpy lacks, as 16-bit words."""
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of one transition's value."""
        return prod(self.shape) * self.storage_dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where everything lies; the same in every process.

    The words of the schedule are those of units: an environment, or a batch of environments that
    steps as a whole. Every environment has its own row.

    Args:
        num_envs: N.
        sync_interval: T, alpha.
        lag: S - 1.
        num_workers: rows of counters.
        fields: the arrays of a slot.
        parameters: shape-and-dtype of each behaviour parameter and buffer, as fields.
        timeline_events: records that the ring of each worker and of the learner holds.
        first_env: the number of environment 0 among the environments of all learners.
        all_envs: how many those are; 0: N.
        group: environments whose rows are given bits by themselves, whoever else there is; 0: N.
        units: how many environments each unit has; (): one each.
        groups: by key, the batch size that what holds others has in a transition: the number of
            agents of a group; of all else it is ().
    """

    num_envs: int
    sync_interval: int
    lag: int
    num_workers: int
    fields: tuple[Field, ...]
    parameters: tuple[Field, ...]
    timeline_events: int = 0
    first_env: int = 0
    all_envs: int = 0
    group: int = 0
    units: tuple[int, ...] = ()
    groups: tuple[tuple[Key, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        for name in ("all_envs", "group"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.num_envs)

    @property
    def num_slots(self) -> int:
        """S."""
        return self.lag + 1

    @property
    def num_units(self) -> int:
        """How many units the schedule has."""
        return len(self.units) or self.num_envs

    def rows(self, unit: int) -> range:
        """The environments of a unit, which are neighbours."""
        if not self.units:
            return range(unit, unit + 1)
        first = sum(self.units[:unit])
        return range(first, first + self.units[unit])

    def envs(self, units: Iterable[int]) -> tuple[int, ...]:
        """The environments of some units."""
        return tuple(env for unit in units for env in self.rows(unit))

    def _header(self) -> list[int]:
        """Bytes of: the learner's words, steps, phases, counters, histograms, rings."""
        return [
            2 * 8,
            self.num_units * 8,
            self.num_units,
            self.num_workers * len(Counter) * 8,
            self.num_workers * self.num_buckets * 8,
            self.timeline_bytes,
        ]

    @property
    def num_buckets(self) -> int:
        """Of a histogram: of times by their bits, or of batch sizes."""
        return max(_DURATIONS, self.num_envs + 1)

    @property
    def timeline_bytes(self) -> int:
        """Size of all rings: of each worker, and of the learner."""
        return (self.num_workers + 1) * self.ring_bytes

    @property
    def ring_bytes(self) -> int:
        """Size of one ring: how many records were written so far, and one more than it holds.

        That one is under way while the others are read.
        """
        if not self.timeline_events:
            return 0
        return _ALIGNMENT + (self.timeline_events + 1) * RECORD_BYTES

    def _slot(self) -> list[int]:
        transitions = self.num_envs * self.sync_interval
        return [field.num_bytes * transitions for field in self.fields] + [
            field.num_bytes for field in self.parameters
        ]

    @property
    def header_offsets(self) -> list[int]:
        """Offsets of the parts of the header, and its end."""
        return _offsets(self._header())

    def slot_offsets(self, slot: int) -> list[int]:
        """Offsets of a slot's fields, then of its parameters."""
        offsets = _offsets(self._slot())
        start = self.header_offsets[-1] + slot * offsets[-1]
        return [start + offset for offset in offsets[:-1]]

    @property
    def num_bytes(self) -> int:
        """Size of the whole block."""
        return self.header_offsets[-1] + self.num_slots * _offsets(self._slot())[-1]


class SharedMemory:
    """The block of memory, mapped into this process.

    Args:
        fd: file descriptor of the block (see `create_fd`).
        layout: what lies where.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        self.layout = layout
        self.buffer = _mapped(fd, layout)
        n = layout.num_units
        learner, steps, phase, counters, histograms, self._rings, _ = layout.header_offsets
        self.learner: npt.NDArray[np.int64] = self._array(learner, (2,), np.dtype(np.int64))
        self.steps: npt.NDArray[np.int64] = self._array(steps, (n,), np.dtype(np.int64))
        self.phase: npt.NDArray[np.uint8] = self._array(phase, (n,), np.dtype(np.uint8))
        self.counters: npt.NDArray[np.int64] = self._array(
            counters, (layout.num_workers, len(Counter)), np.dtype(np.int64)
        )
        # Executors: steps by the bits of their time in ns; actors: batches by their rows.
        self.histograms: npt.NDArray[np.int64] = self._array(
            histograms, (layout.num_workers, layout.num_buckets), np.dtype(np.int64)
        )

    @staticmethod
    def create_fd(storage_dir: str | None = None) -> int:
        """A new, empty block without a name; grows when it is first mapped.

        Args:
            storage_dir: a directory for it; None for memory, as far as the system offers that.
        """
        fill_standard_descriptors()
        fd = anonymous_memory("torchrl_hts") if storage_dir is None else None
        if fd is not None:
            return fd
        with tempfile.TemporaryFile(prefix="torchrl_hts-", dir=storage_dir) as file:
            return os.dup(file.fileno())

    def schedule(self, last_round: int | None) -> Schedule:
        """The schedule over the shared words.

        They are given as memoryviews: indexing one is twice as fast as indexing an array.
        """
        return Schedule(
            self.layout.num_units,
            self.layout.sync_interval,
            self.layout.lag,
            last_round=last_round,
            steps=self.steps.data,
            phase=self.phase.data,
            learner=self.learner.data,
        )

    def ring(self, worker: int) -> tuple[memoryview[int], memoryview[int]]:
        """The count and the records of a worker's ring; the learner's is after all workers'."""
        start = self._rings + worker * self.layout.ring_bytes
        view = memoryview(self.buffer)[start : start + self.layout.ring_bytes]
        return view[:8].cast("q"), view[_ALIGNMENT:]

    def fields(self, slot: int) -> dict[Key, Array]:
        """The arrays ``[N, T, *shape]`` of a slot."""
        n, t = self.layout.num_envs, self.layout.sync_interval
        offsets = self.layout.slot_offsets(slot)
        return {
            field.key: self._array(offset, (n, t, *field.shape), field.storage_dtype)
            for field, offset in zip(self.layout.fields, offsets, strict=False)
        }

    def parameters(self, slot: int) -> list[Array]:
        """The arrays of a slot's behaviour parameters, in the order of the layout."""
        offsets = self.layout.slot_offsets(slot)[len(self.layout.fields) :]
        return [
            self._array(offset, field.shape, field.storage_dtype)
            for field, offset in zip(self.layout.parameters, offsets, strict=True)
        ]

    def _array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if prod(shape) == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(self.buffer, dtype, prod(shape), offset).reshape(shape)


def _mapped(fd: int, layout: Layout) -> mmap.mmap:
    """The block, mapped; the first process that does so gives it its size.

    That of a file is allocated at once: a disk that is full later would kill with SIGBUS.
    """
    num_bytes, in_memory = layout.num_bytes, is_anonymous_memory(fd)
    try:
        if os.fstat(fd).st_size < num_bytes:
            os.truncate(fd, num_bytes)
            if not in_memory and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, num_bytes)
        return mmap.mmap(fd, num_bytes)
    except (OSError, OverflowError) as error:  # the latter: more than an address can hold
        why = f"and to allocate them failed ({error})"
        raise no_room(num_bytes, layout.timeline_bytes, why, in_memory=in_memory) from error


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Aligned offsets of consecutive parts, and the end of the last."""
    offsets = [0]
    for size in sizes:
        offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return offsets
