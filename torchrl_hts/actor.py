"""An actor: polls whatever observations are ready and answers them with one forward pass.

Runs in a process of its own and never steps an environment. Per batch: the ready rows of one round
are gathered from its slot, padded to a batch size of the calibrated set, run with the slot's own
parameters and counter-based noise (I2, I6), and what the policy writes is scattered back.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import isnan
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_hts.draws import CounterNoise, Words, uniforms_of
from torchrl_hts.errors import Failure, PolicyError, failure_of
from torchrl_hts.exchange import STOP, Inbox
from torchrl_hts.gathering import Gatherer
from torchrl_hts.invariance import (
    InvariantSizes,
    choose_sizes,
    mixing_modules,
)
from torchrl_hts.messages import receive_object, send_object
from torchrl_hts.recording import Activity, Record, recorder
from torchrl_hts.sampling import CounterPolicy
from torchrl_hts.slots import Slots, bind_parameters
from torchrl_hts.storage import Array, Counter, Key, Layout, SharedMemory
from torchrl_hts.watching import Watcher

__all__ = ["ActorJob", "run_actor"]

# How much the calibration compares, at least: rows, and numbers where a row has few.
_CALIBRATION_ROWS = 64
_CALIBRATION_FLOATS = 8192
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
        examples: pickled TensorDict ``[D N]`` of the policy's inputs, to calibrate with.
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
    with (
        torch.inference_mode(),
        set_exploration_type(job.exploration_type),
        np.errstate(over="ignore", invalid="ignore"),  # NaN is looked for, and told of as an error
    ):
        try:
            actor = _Actor(job, memory)
            send_object(control, ("calibrated", job.sizes or actor.calibrate(), None))
        except PolicyError as error:
            send_object(control, ("policy", str(error), None))
            return
        actor.sizes = receive_object(control)
        watcher = Watcher(inbox, actor.schedule, a_core_each=job.a_core_each)
        source = Gatherer(watcher, job.owner, memory.counters, job.cores)
        counters = memory.counters[job.worker].data
        histogram = memory.histograms[job.worker].data
        record = recorder(memory, job.worker)
        while True:
            actor.start(receive_object(control))
            try:
                _serve(actor, source, executors, counters, histogram, record)
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
    actor: _Actor,
    source: Gatherer,
    executors: Sequence[Inbox],
    counters: memoryview[int],
    histogram: memoryview[int],
    record: Record | None,
) -> None:
    """Answer observations until told to stop."""
    clock = time.perf_counter_ns
    schedule, owner = actor.schedule, actor.job.owner
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
        for env in words:
            rounds.setdefault(schedule.position(env)[0], []).append(env)
        for round_ in sorted(rounds):  # one forward pass never mixes two versions (I2)
            envs = sorted(rounds[round_])
            schedule.take(envs)
            counters[Counter.AT] = round_ + 1
            for batch in actor.sizes.split(envs):
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


class _Actor:
    """The policy of every slot, and the buffers between it and the slots."""

    def __init__(self, job: ActorJob, memory: SharedMemory) -> None:
        self.job = job
        self.schedule = memory.schedule(job.last_round)
        self.steps = memory.steps
        layout = job.layout
        self.num_envs, self.sync_interval = layout.num_envs, layout.sync_interval
        self.sizes = InvariantSizes((self.num_envs,), self.num_envs, fixed_rows=True)
        self.examples: TensorDictBase = pickle.loads(job.examples)
        self.device = torch.device(job.device)
        self.slots = Slots(memory)
        policy: TensorDictModuleBase = pickle.loads(job.policy).to(self.device)
        self.policies: list[CounterPolicy] = []
        self.refreshers: list[Callable[[], None] | None] = []
        for parameters in self.slots.parameters:
            module = deepcopy(policy)
            self.refreshers.append(bind_parameters(module, parameters, self.device))
            self.policies.append(CounterPolicy(module, job.exploration_type))
        # The rows of a slot, environment-major: row i * T + t of a flat array.
        flat = [
            {key: array.reshape(-1, *array.shape[2:]) for key, array in memory.fields(s).items()}
            for s in range(layout.num_slots)
        ]
        self.inputs = tuple(key for key, _ in _items(self.examples))
        self.input_rows = [[slot[key] for key in self.inputs] for slot in flat]
        self.outputs = tuple(_nested(key) for key in job.outputs)
        self.output_rows = [
            [(_nested(key), slot[key], slot[key].shape[1:]) for key in job.outputs] for slot in flat
        ]
        self.buffers = [
            (
                _nested(key),
                torch.zeros(
                    (self.num_envs, *value.shape[1:]),
                    dtype=value.dtype,
                    pin_memory=self.device.type == "cuda",
                ),
            )
            for key, value in _items(self.examples)
        ]
        self.buffer_rows = [_as_array(buffer) for _, buffer in self.buffers]
        self.views: dict[int, dict[str | Key, Tensor]] = {}  # their first rows, by how many
        for policy_of_slot in self.policies:
            policy_of_slot.prepare(self.examples[: self.num_envs].to(self.device))
        self.width = self.policies[0].width
        # The noise of a batch's rows, padded ones too, and of all rows of each slot; in the form
        # that `_noise_for` gives it.
        zeros = np.zeros((self.num_envs, self.width), np.uint64)
        self.batch_noise = _noise_for(self.policies[0], zeros)
        self.rounds: list[int | None] = [None] * layout.num_slots
        self.noise: list[Words] = [self.batch_noise] * layout.num_slots

    def start(self, seed: int) -> None:
        """Get ready for a run."""
        layout = self.job.layout
        self.counter_noise = CounterNoise(seed, layout.num_envs, layout.sync_interval, self.width)
        self.rounds = [None] * layout.num_slots

    def infer(self, round_: int, envs: Sequence[int]) -> int:
        """Compute and write the actions of ``envs``, all in one round; returns the rows run."""
        slot = self.schedule.slot(round_)
        if self.rounds[slot] != round_:
            self.rounds[slot] = round_
            words = self.counter_noise.round(round_).reshape(
                self.num_envs * self.sync_interval, self.width
            )
            self.noise[slot] = _noise_for(self.policies[slot], words)
            refresh = self.refreshers[slot]
            if refresh is not None:
                refresh()
        index = np.array(envs)
        rows = index * self.sync_interval + self.steps[index] % self.sync_interval
        size = self.sizes.pad(len(envs))
        at: Any = index if self.sizes.fixed_rows else slice(len(envs))
        for buffer, source in zip(self.buffer_rows, self.input_rows[slot], strict=True):
            if self.sizes.fixed_rows:
                buffer[at] = source[rows]
            else:
                source.take(rows, 0, buffer[at], "clip")
        self.batch_noise[at] = self.noise[slot].take(rows, 0)
        result = self._run(self.policies[slot], size)
        for key, target, shape in self.output_rows[slot]:
            written = result[key]
            value = _as_array(written)
            if value.shape != (size, *shape):
                raise PolicyError(
                    f"the policy wrote {key!r} of shape {value.shape[1:]} per row, in "
                    f"{len(value)} rows; at start-up it was {shape}, and {size} rows were expected"
                )
            value = value[at]
            # One number tells: the sum is NaN where a value is (and where infinities cancel).
            if value.dtype.kind == "f":
                total = np.add.reduce(value, None)
            else:
                total = written.sum().item() if written.dtype == torch.bfloat16 else 0
            if isnan(total):
                self._check_numbers(key, written[at], slot, index, rows)
            target[rows] = value
        return size

    def _check_numbers(
        self,
        key: str | Key,
        value: Tensor,
        slot: int,
        envs: npt.NDArray[np.intp],
        rows: npt.NDArray[np.intp],
    ) -> None:
        """Raise PolicyError if an output is NaN, and say what it comes from.

        Args:
            key: of the output, whose values for ``envs``, at ``rows`` of the slot, are ``value``.
        """
        bad = value.isnan().reshape(len(envs), -1).any(1).cpu().numpy()
        if not bad.any():
            return
        parameters = [
            name
            for name, tensor in self.policies[slot].policy.named_parameters()
            if not tensor.isfinite().all()
        ]
        inputs = [
            ".".join(name)
            for name, source in zip(self.inputs, self.input_rows[slot], strict=True)
            if source.dtype.kind == "f" and not np.isfinite(source[rows[bad]]).all()
        ]
        cause = "its parameters and inputs are finite: check the learning rate and the policy"
        if parameters:
            cause = f"not finite are {', '.join(parameters[:3])}: check the learning rate"
        elif inputs:
            cause = f"not finite are its inputs {', '.join(inputs[:3])}: check the environment"
        raise PolicyError(
            f"the policy returned NaN in {key!r} for environment(s) {envs[bad].tolist()}; {cause}"
        )

    def _run(self, policy: CounterPolicy, size: int) -> Mapping[Any, Tensor] | TensorDictBase:
        """Run a policy on the first ``size`` rows of the buffers."""
        noise = self.batch_noise[:size]
        views = self.views.get(size)
        if views is None:
            views = self.views[size] = {key: buffer[:size] for key, buffer in self.buffers}
        # A new dict each time: what the policy writes must not stay in the next call's input.
        inputs = dict(views)
        if self.device.type != "cpu":
            inputs = {key: value.to(self.device) for key, value in views.items()}
        if policy.short_cut:
            return policy.compute(inputs, noise.view(np.float64))
        return policy(TensorDict(inputs, [size]), noise)

    def calibrate(self) -> InvariantSizes:
        """Find the batch sizes that agree bitwise, running just what `infer` runs.

        Compared are the outputs and what every module inside passes on: two sizes that round
        differently in some layer often agree in a few outputs, so as many numbers as it takes.
        """
        self.refresh_all()
        available = self.examples.shape[0]
        words = np.random.default_rng(0).integers(
            0, 2**64, (available, self.width), np.uint64, endpoint=False
        )
        sources = [_as_array(self.examples.get(key)) for key in self.inputs]
        policy = self.policies[0]
        noise = _noise_for(policy, words)
        inner: list[Tensor] = []

        def keep(module: nn.Module, inputs: object, output: object) -> None:
            inner.extend(value for value in _flat(output))

        def run(row_ids: npt.NDArray[np.int64]) -> list[Tensor]:
            size = len(row_ids)
            for buffer, source in zip(self.buffer_rows, sources, strict=True):
                buffer[:size] = source[row_ids]
            self.batch_noise[:size] = noise[row_ids]
            inner.clear()
            result = self._run(policy, size)
            outputs = [result[key] for key in self.outputs]
            outputs += [value for value in inner if value.shape[:1] == (size,)]
            return [v.cpu().clone(memory_format=torch.contiguous_format) for v in outputs]

        leaves = [m for m in policy.policy.modules() if not list(m.children())]
        hooks = [module.register_forward_hook(keep) for module in leaves]
        try:
            floats = sum(
                value[0].numel()
                for value in run(np.arange(self.num_envs))
                if value.is_floating_point()
            )
            rows = min(available, max(_CALIBRATION_ROWS, _CALIBRATION_FLOATS // max(floats, 1)))
            return choose_sizes(
                run,
                num_envs=self.num_envs,
                num_rows=rows,
                suspects=mixing_modules(policy.policy),
            )
        finally:
            for hook in hooks:
                hook.remove()

    def refresh_all(self) -> None:
        """Load every slot's parameters to the device."""
        for refresh in self.refreshers:
            if refresh is not None:
                refresh()


def _noise_for(policy: CounterPolicy, words: Words) -> Words:
    """Words as `_Actor._run` hands them to the policy: for its short cut the bits of uniforms.

    One data type serves both, so that no buffer depends on which of the two a policy takes.
    """
    return uniforms_of(words).view(np.uint64) if policy.short_cut else words


def _flat(output: object) -> list[Tensor]:
    """The tensors in what a module returns."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, tuple | list):
        return [tensor for part in output for tensor in _flat(part)]
    return []


def _items(td: TensorDictBase) -> list[tuple[Key, Tensor]]:
    return [
        (key if isinstance(key, tuple) else (key,), value)
        for key, value in td.items(include_nested=True, leaves_only=True)
    ]


def _nested(key: Key) -> str | Key:
    """The key as policies write it."""
    return key[0] if len(key) == 1 else key


def _as_array(tensor: Tensor) -> Array:
    """The values as an array, over a CPU tensor's memory; bfloat16 as 16-bit words, as stored."""
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
        return tensor.numpy().view(np.uint16)
    return tensor.numpy()
