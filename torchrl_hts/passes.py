"""What a forward pass of a policy costs, on one thread and as actors run it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_hts.sampling import CounterPolicy

__all__ = ["median_cpu_time", "time_passes"]


def time_passes(
    policy: TensorDictModuleBase,
    examples: TensorDictBase,
    rows: Sequence[int],
    seconds: float,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
) -> tuple[float, ...]:
    """Processor time in seconds of a forward pass of each number of rows, on one thread.

    Args:
        policy: on the CPU, and nobody else's: it is run.
        examples: its inputs, for at least as many rows.
        rows: of a pass.
        seconds: in all, but for at least five passes of each.
        exploration_type: under which it runs.
    """
    runner = CounterPolicy(policy, exploration_type)
    most = max(rows)
    with _one_thread(), torch.inference_mode(), set_exploration_type(exploration_type):
        runner.prepare(examples[:most])
        words = np.random.default_rng(0).integers(
            0, 2**64, (most, runner.width), np.uint64, endpoint=False
        )

        def run(count: int) -> None:
            inputs = dict(examples[:count].items(include_nested=True, leaves_only=True))
            if runner.short_cut:
                runner.compute(inputs, words[:count])
            else:
                runner(TensorDict(inputs, [count]), words[:count])

        return tuple(median_cpu_time(partial(run, count), seconds / len(rows)) for count in rows)


def median_cpu_time(function: Callable[[], object], seconds: float) -> float:
    """Processor time of a call by this thread, in seconds: what others do meanwhile doesn't count.

    Args:
        function: is called three times more to warm up.
        seconds: for how long to call it, but for five times at least.
    """
    for _ in range(3):
        function()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        began = time.thread_time()
        function()
        times.append(time.thread_time() - began)
    return float(np.median(times))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch computes on the thread that calls it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
