"""What a forward pass of a policy costs, as actors run it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from multiprocessing.connection import Connection

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType

from torchrl_hts._planning.costs import PassCosts
from torchrl_hts._policy.compiled import eagerly
from torchrl_hts._policy.counter_policy import CounterPolicy, inference
from torchrl_hts._policy.numpy_layers import layers_in_numpy
from torchrl_hts._policy.packed_layers import PackedLayers
from torchrl_hts._processes.messages import receive_object, send_object, unpickled
from torchrl_hts._processes.stderr import be_silent

__all__ = ["PassJob", "Timed", "median_cpu_time", "run_passes", "time_passes"]

_SECONDS = 0.01  # how long passes are repeated, at least
_AT_MOST_S = 0.25  # of each number of rows, and one pass more; dear ones need no averaging
_WARM_UP, _LEAST = 3, 5  # calls


@dataclass(frozen=True)
class PassJob:
    """To a trial of the policy: passes to be timed. Answered by `Timed`.

    Attributes:
        policy: the pickled policy, its tensors on the CPU.
        examples: pickled TensorDict ``[N]`` of its inputs.
        exploration_type: under which it runs.
    """

    policy: bytes
    examples: bytes
    exploration_type: ExplorationType


@dataclass(frozen=True)
class Timed:
    """From a trial of the policy, before it ends.

    Attributes:
        costs: of passes of one row and of all rows.
    """

    costs: PassCosts


def run_passes(control: Connection, fds: Sequence[int]) -> None:
    """Time the passes of a `PassJob`.

    In a process of its own that then ends, so that nothing of it is left in the user's.

    Args:
        control: connection to the main process.
        fds: none.
    """
    job: PassJob = receive_object(control)
    be_silent()  # the actors' policies will say it as well
    torch.set_num_threads(1)
    examples = unpickled(job.examples)
    rows = sorted({1, examples.batch_size[0]})
    policy = unpickled(job.policy)
    with eagerly():
        costs = time_passes(policy, examples, rows, _SECONDS, job.exploration_type, _AT_MOST_S)
    send_object(control, Timed(costs))


def time_passes(
    policy: TensorDictModuleBase,
    examples: TensorDictBase,
    rows: Sequence[int],
    seconds: float,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    at_most_s: float = inf,
) -> PassCosts:
    """What forward passes of so many rows cost: processor time, of this thread alone.

    Args:
        policy: on the CPU, and nobody else's: it is run.
        examples: its inputs, for at least as many rows.
        rows: of a pass, ascending from 1.
        seconds: in all, but for at least five passes of each.
        exploration_type: under which it runs.
        at_most_s: each number of rows takes no more than one pass after so many seconds.
    """
    most = max(rows)
    with inference(exploration_type):
        runner = _prepared(policy, exploration_type, examples[:most])
        words = np.random.default_rng(0).integers(
            0, 2**64, (most, runner.width), np.uint64, endpoint=False
        )
        noise = runner.noise_of(words)
        inputs = runner.inputs_of(dict(examples.items(include_nested=True, leaves_only=True)))

        def run(count: int) -> None:
            runner.run({key: value[:count] for key, value in inputs.items()}, noise[:count])

        share_s = seconds / len(rows)
        times = tuple(median_cpu_time(partial(run, count), share_s, at_most_s) for count in rows)
        return PassCosts(tuple(rows), times)


def _prepared(
    policy: TensorDictModuleBase, exploration_type: ExplorationType, example: TensorDictBase
) -> CounterPolicy:
    """The policy ready to run as in an actor, its large layers packed where that works."""

    def prepare() -> CounterPolicy:
        runner = CounterPolicy(policy, exploration_type)
        runner.prepare(example)
        return runner

    layers_in_numpy(policy)
    layers = PackedLayers(policy, example.batch_size[0])
    if len(layers):
        try:
            layers.pack()
            return prepare()
        except Exception:  # as in an actor, which then runs them as they are
            layers.unpack()
    return prepare()


def median_cpu_time(
    function: Callable[[], object], seconds: float, at_most_s: float = inf
) -> float:
    """Processor time of a call by this thread, in seconds: what others do meanwhile doesn't count.

    Args:
        function: is called, three times of them to warm up.
        seconds: for how long to call it, but for eight times at least;
        at_most_s: but for no more than one call after so many seconds.
    """
    times: list[float] = []
    start, passed_s = time.perf_counter(), 0.0
    while passed_s < at_most_s and (passed_s < seconds or len(times) < _WARM_UP + _LEAST):
        began = time.thread_time()
        function()
        times.append(time.thread_time() - began)
        passed_s = time.perf_counter() - start
    return float(np.median(times[_WARM_UP:] or times[-1:]))
