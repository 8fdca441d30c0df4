"""An actor: polls whatever observations are ready and answers them with one forward pass.

Runs in a process of its own and never steps an environment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from torchrl_hts._actor.batch_inference import BatchInference
from torchrl_hts._actor.calibration import calibrate
from torchrl_hts._actor.messages import ActorJob, Calibrated, PolicyRefused, StartActor, UseSizes
from torchrl_hts._policy.compiled import eagerly
from torchrl_hts._policy.counter_policy import inference
from torchrl_hts._processes.linux import give_back_memory
from torchrl_hts._processes.messages import receive_object, send_object
from torchrl_hts._processes.raised import Raised
from torchrl_hts._rounds.event_rings import Activity, Record, recorder
from torchrl_hts._rounds.exchange import STOP, Inbox
from torchrl_hts._rounds.gathering import Gatherer
from torchrl_hts._rounds.inbox_reader import InboxReader
from torchrl_hts._rounds.replies import Failed, Stopped
from torchrl_hts._rounds.shared_memory import Counter, SharedMemory
from torchrl_hts.errors import PolicyError

__all__ = ["run_actor"]

# How long to wait for more rows, at most: so many times what serving took the last time. What the
# wait can save is less than one of these times; usually it ends long before.
_PATIENCE = 4


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
                random_policy=job.random_policy,
                random_rounds=job.random_rounds,
            )
            # Until this is sent, nobody writes to the parameters that a policy is tried with.
            sizes = job.sizes or calibrate(actor)
            actor.use(sizes)
            send_object(control, Calibrated(sizes))
        except PolicyError as error:
            send_object(control, PolicyRefused(str(error)))
            return
        agreed: UseSizes = receive_object(control)
        actor.use(agreed.sizes)
        # Of many environments, what trying them took is as much as what the coming rounds take.
        actor.forget_trial()
        job = replace(job, policy=b"", examples=b"")
        give_back_memory()
        reader = InboxReader(inbox, actor.schedule, a_core_each=job.a_core_each)
        source = Gatherer(reader, job.owner, memory.counters, job.cores)
        counters = memory.counters[job.worker].data
        histogram = memory.histograms[job.worker].data
        record = recorder(memory, job.worker)
        while True:
            start: StartActor = receive_object(control)
            actor.start(start.noise_seed)
            try:
                _serve(actor, job.owner, source, executors, counters, histogram, record)
            except _InferenceError as error:
                send_object(control, error.told)
                return
            send_object(control, Stopped())


class _InferenceError(Exception):
    """The policy failed.

    Attributes:
        told: what the main process is to hear of it.
    """

    def __init__(self, envs: tuple[int, ...], round_: int, error: BaseException) -> None:
        self.told = Failed(Raised.of(error), envs, round_)


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
    used_before = time.process_time_ns() - source.reader.looking_ns - counters[Counter.CPU_NS]
    while True:
        asleep = clock()
        words = source.gather(_PATIENCE * served_ns)
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
        for unit in sorted(words):
            rounds.setdefault(steps[unit] // interval, []).append(unit)
        for round_, units in sorted(rounds.items()):  # a pass never mixes two versions (I2)
            schedule.take(units)
            counters[Counter.AT] = round_ + 1
            for answered, rows in actor.passes.of(units, actor.sizes):
                try:
                    padded = actor.infer(round_, rows)
                except Exception as error:
                    envs = tuple((rows // interval).tolist())
                    raise _InferenceError(envs, round_, error) from error
                schedule.answer(answered)
                if record is not None:  # before anybody can act on the answers
                    now = clock()
                    record(Activity.INFER, before, now, round_, 0, len(rows), padded)
                    before = now
                answers: dict[int, list[int]] = {}
                for unit in answered:
                    answers.setdefault(owner[unit], []).append(unit)
                for executor, own in answers.items():  # one wake-up per executor and batch
                    executors[executor].post(own)
                counters[Counter.EVENTS] += 1
                counters[Counter.ROWS] += len(rows)
                histogram[len(rows)] += 1
                counters[Counter.PADDED_ROWS] += padded
            counters[Counter.AT] = 0
        served_ns = clock() - awake
        counters[Counter.BUSY_NS] += served_ns
        used = time.process_time_ns() - source.reader.looking_ns
        counters[Counter.CPU_NS] = used - used_before
