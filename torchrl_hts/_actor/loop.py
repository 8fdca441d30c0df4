"""An actor: polls whatever observations are ready and answers them with one forward pass.

Runs in a process of its own and never steps an environment.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torchrl.envs.utils import ExplorationType

from torchrl_hts._actor.batch_inference import BatchInference
from torchrl_hts._policy.compiled import eagerly
from torchrl_hts._policy.counter_policy import inference
from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._processes.messages import receive_object, send_object
from torchrl_hts._rounds.event_rings import Activity, Record, recorder
from torchrl_hts._rounds.exchange import STOP, Inbox
from torchrl_hts._rounds.gathering import Gatherer
from torchrl_hts._rounds.shared_memory import Counter, Key, Layout, SharedMemory
from torchrl_hts._rounds.watching import Watcher
from torchrl_hts.errors import Failure, PolicyError, failure_of

__all__ = ["ActorJob", "run_actor"]

# How long to wait for more rows, at most: so many times what serving took the last time. What the
# wait can save is less than one of these times; usually it ends long before.
_PATIENCE = 4


@dataclass(frozen=True)
class ActorJob:
    """First message to an actor.

    Attributes:
        policy: the pickled policy, its tensors on the CPU.
        layout: the shared memory's layout.
        last_round: the round at which the run ends; None for an endless one.
        worker: its row of counters.
        examples: pickled `TrialInputs` of the policy, to calibrate with.
        outputs: keys that the policy writes and that are stored.
        exploration_type: under which the policy runs.
        device: where it runs.
        num_threads: torch's intra-op threads.
        owner: for each environment, the index of its executor.
        cores: the number of cores to keep busy; None where other actors read the same inbox.
        a_core_each: whether there are cores enough for all threads of executors and actors.
        sizes: the batch sizes that agree; None if the actor is to find out.
    """

    policy: bytes
    layout: Layout
    last_round: int | None
    worker: int
    examples: bytes
    outputs: tuple[Key, ...]
    exploration_type: ExplorationType
    device: str
    num_threads: int
    owner: tuple[int, ...]
    cores: int | None
    a_core_each: bool
    sizes: InvariantSizes | None = None


def run_actor(control: Connection, fds: list[int]) -> None:
    """Serve rounds until the control connection closes.

    Args:
        control: connection to the main process.
        fds: shared memory, actors' inbox (read), actors' inbox (write), executors' inboxes (write).
    """
    job: ActorJob = receive_object(control)
    torch.set_num_threads(job.num_threads)
    memory = SharedMemory(fds[0], job.layout)
    inbox = Inbox(fds[1], fds[2])
    executors = [Inbox(-1, fd) for fd in fds[3:]]
    with inference(job.exploration_type), eagerly():
        try:
            actor = BatchInference(
                memory,
                job.policy,
                job.examples,
                job.outputs,
                exploration_type=job.exploration_type,
                device=job.device,
                last_round=job.last_round,
            )
            # Until this is sent, nobody writes to the parameters that a policy is tried with.
            sizes = job.sizes or actor.calibrate()
            actor.use(sizes)
            send_object(control, ("calibrated", sizes, None))
        except PolicyError as error:
            send_object(control, ("policy", str(error), None))
            return
        actor.use(receive_object(control))
        watcher = Watcher(inbox, actor.schedule, a_core_each=job.a_core_each)
        source = Gatherer(watcher, job.owner, memory.counters, job.cores)
        counters = memory.counters[job.worker].data
        histogram = memory.histograms[job.worker].data
        record = recorder(memory, job.worker)
        while True:
            actor.start(receive_object(control))
            try:
                _serve(actor, job.owner, source, executors, counters, histogram, record)
            except _InferenceError as error:
                send_object(control, ("failed", error.what, error.where))
                return
            send_object(control, ("stopped", None, None))


class _InferenceError(Exception):
    """The policy failed: how, with its traceback; for which environments, in which round."""

    def __init__(self, envs: tuple[int, ...], round_: int, error: BaseException) -> None:
        self.what: tuple[Failure, str] = (failure_of(error), traceback.format_exc())
        self.where = (envs, round_, None)


def _serve(
    actor: BatchInference,
    owner: Sequence[int],
    source: Gatherer,
    executors: Sequence[Inbox],
    counters: memoryview[int],
    histogram: memoryview[int],
    record: Record | None,
) -> None:
    """Answer observations until told to stop."""
    clock = time.perf_counter_ns
    schedule = actor.schedule
    steps, interval = schedule.steps, schedule.sync_interval
    served_ns = 0
    used_before = time.process_time_ns() - source.watcher.looking_ns - counters[Counter.CPU_NS]
    while True:
        asleep = clock()
        words = source.take(_PATIENCE * served_ns)
        awake = before = clock()
        counters[Counter.WAITING_NS] += awake - asleep
        counters[Counter.GATHERING_NS] += source.waited_ns
        if record is not None:
            record(Activity.OBSERVATION_WAIT, asleep, awake)
        stops = words.count(STOP)
        if stops:
            if stops > 1:  # the others' share
                source.inbox.post([STOP] * (stops - 1))
            return
        rounds: dict[int, list[int]] = {}
        for env in sorted(words):
            rounds.setdefault(steps[env] // interval, []).append(env)
        for round_, envs in sorted(rounds.items()):  # a pass never mixes two versions (I2)
            schedule.take(envs)
            counters[Counter.AT] = round_ + 1
            for batch in actor.batches(envs):
                try:
                    padded = actor.infer(round_, batch)
                except Exception as error:
                    raise _InferenceError(tuple(batch), round_, error) from error
                schedule.answer(batch)
                if record is not None:  # before anybody can act on the answers
                    now = clock()
                    record(Activity.INFER, before, now, round_, 0, len(batch), padded)
                    before = now
                answers: dict[int, list[int]] = {}
                for env in batch:
                    answers.setdefault(owner[env], []).append(env)
                for executor, answered in answers.items():  # one wake-up per executor and batch
                    executors[executor].post(answered)
                counters[Counter.EVENTS] += 1
                counters[Counter.ROWS] += len(batch)
                histogram[len(batch)] += 1
                counters[Counter.PADDED_ROWS] += padded
            counters[Counter.AT] = 0
        served_ns = clock() - awake
        counters[Counter.BUSY_NS] += served_ns
        used = time.process_time_ns() - source.watcher.looking_ns
        counters[Counter.CPU_NS] = used - used_before
