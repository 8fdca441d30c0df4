"""What an actor does with a batch: from the rows of a slot through the policy and back.

The ready rows of one round are gathered from its slot, padded to a batch size of the calibrated
set, run with the slot's own parameters and counter-based noise (I2, I6), and what the policy writes
is scattered back.

Axes: N environments, D times N example rows, T steps of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType

from torchrl_hts._policy.counter_policy import CounterPolicy
from torchrl_hts._policy.draws import CounterNoise, Words
from torchrl_hts._policy.invariance import (
    InvariantSizes,
    choose_sizes,
    mixing_modules,
    with_larger,
)
from torchrl_hts._policy.packed_layers import PackedLayers
from torchrl_hts._policy.transposed_layers import transpose_layers
from torchrl_hts._policy.trial_inputs import TrialInputs
from torchrl_hts._processes.messages import unpickled
from torchrl_hts._rounds.shared_memory import Array, Key, SharedMemory
from torchrl_hts._rounds.slots import Slots, bind_parameters
from torchrl_hts.errors import PolicyError

__all__ = ["BatchInference"]

# How much the calibration compares, at least: rows, and numbers where a row has few.
_CALIBRATION_ROWS = 64
_CALIBRATION_FLOATS = 8192


class BatchInference:
    """The policy of every slot, and the buffers between it and the slots.

    To be made and used inside `counter_policy.inference`.

    Args:
        memory: the shared memory.
        policy: the pickled policy, its tensors on the CPU.
        examples: pickled `TrialInputs` of the policy, to calibrate with.
        outputs: keys that the policy writes and that are stored.
        exploration_type: under which the policy runs.
        device: where it runs.
        last_round: the round at which the run ends; None for an endless one.

    Attributes:
        schedule: the schedule, over shared words.
        sizes: the batch sizes that agree, see `use`. Before, only the full batch serves.
        packed: whether large layers run with weights that are put in order once a round.
        transposed: whether linear layers that aren't packed multiply the other way round.
        keeps_weights: whether running the policy left the weights as they were that may be packed.

    Raises:
        PolicyError: see `CounterPolicy.prepare`.
    """

    def __init__(
        self,
        memory: SharedMemory,
        policy: bytes,
        examples: bytes,
        outputs: Sequence[Key],
        *,
        exploration_type: ExplorationType,
        device: str,
        last_round: int | None,
    ) -> None:
        layout = memory.layout
        self.num_envs, self.sync_interval = layout.num_envs, layout.sync_interval
        self.first_env = layout.first_env
        # Of several learners each runs what one of any number of them would: groups.
        self.group = layout.group or layout.num_envs
        self.num_slots = layout.num_slots
        self.schedule = memory.schedule(last_round)
        self.sizes = InvariantSizes((self.group,), self.group, fixed_rows=True)
        self.trial: TrialInputs = unpickled(examples)
        self.examples = self.trial.rows(self.group)
        self.device = torch.device(device)
        self.slots = Slots(memory)
        module: TensorDictModuleBase = unpickled(policy).to(self.device)
        self.exploration_type = exploration_type
        self.outputs = tuple(map(_nested, outputs))
        self.packed = self.transposed = False
        modules: list[TensorDictModuleBase] = []
        self.refreshers: list[Callable[[], None] | None] = []
        for parameters in self.slots.parameters:
            modules.append(_own_copy(module))
            self.refreshers.append(bind_parameters(modules[-1], parameters, self.device))
        self.packable = [PackedLayers(module, self.group) for module in modules]
        weights = self.packable[0].sources
        before = [weight.clone() for weight in weights]
        self._prepare(modules)
        self.keeps_weights = all(map(torch.equal, weights, before))
        # The rows of a slot, environment-major: row i * T + t of a flat array.
        flat = [
            {
                # Not -1: a field may have no elements.
                key: array.reshape(self.num_envs * self.sync_interval, *array.shape[2:])
                for key, array in memory.fields(s).items()
            }
            for s in range(self.num_slots)
        ]
        self.inputs = tuple(key for key, _ in _items(self.examples))
        self.input_rows = [[slot[key] for key in self.inputs] for slot in flat]
        self.output_rows = [
            [(_nested(key), slot[key], slot[key].shape[1:]) for key in outputs] for slot in flat
        ]
        dtypes = {field.key: field.dtype for field in layout.fields}
        self.outputs_tell_nan = any("float" in dtypes[key] for key in outputs)
        buffers = [
            torch.zeros(
                (self.num_envs, *value.shape[1:]),
                dtype=value.dtype,
                pin_memory=self.device.type == "cuda",
            )
            for _, value in _items(self.examples)
        ]
        self.buffer_rows = [_as_array(buffer) for buffer in buffers]
        self.width = self.policies[0].width
        # Of padded rows as well, before there was anything in them.
        zeros = np.zeros((self.num_envs, self.width), np.uint64)
        self.batch_noise = self.policies[0].noise_of(zeros)
        # What the policy is given of the buffers, which are its own to read alone.
        keys = [_nested(key) for key in self.inputs]
        self.batch = self.policies[0].inputs_of(dict(zip(keys, buffers, strict=True)))
        self.views: dict[int, tuple[dict[Any, Any], Words]] = {}  # first rows, by how many
        self.rounds: list[int | None] = [None] * self.num_slots
        self.noise: list[Words] = [self.batch_noise] * self.num_slots

    def _prepare(self, modules: Sequence[TensorDictModuleBase]) -> None:
        """Get the policy of each slot ready to run."""
        self.policies = [
            CounterPolicy(module, self.exploration_type, self.outputs) for module in modules
        ]
        others = next(self.trial.kinds())[: self.group].to(self.device)
        for policy in self.policies:
            policy.prepare(self.examples.to(self.device), others)

    def _arrange(self, *, packed: bool, transposed: bool) -> None:
        """Have large layers packed from now on, and the others transposed, or not."""
        if (packed, transposed) != (self.packed, self.transposed):
            self.packed, self.transposed = packed, transposed
            modules = [policy.policy for policy in self.policies]
            for module, layers in zip(modules, self.packable, strict=True):
                if packed:
                    layers.pack()
                else:
                    layers.unpack()
                transpose_layers(module, transposed)
            self._prepare(modules)

    def use(self, sizes: InvariantSizes) -> None:
        """Run batches of these sizes from now on, as they were measured."""
        self._arrange(packed=sizes.packed, transposed=sizes.transposed)
        self.sizes = sizes

    def batches(self, envs: Sequence[int]) -> list[Sequence[int]]:
        """Environments that are ready, in as few batches as they can be run in."""
        if not self.sizes.fixed_rows:
            return self.sizes.split(envs)
        groups: dict[int, list[int]] = {}  # a batch has one row for each position in a group
        for env in envs:
            groups.setdefault(env // self.group, []).append(env)
        return [*groups.values()]

    def start(self, seed: int) -> None:
        """Get ready for a run."""
        self.counter_noise = CounterNoise(
            seed, self.num_envs, self.sync_interval, self.width, self.first_env
        )
        self.rounds = [None] * self.num_slots

    def infer(self, round_: int, envs: Sequence[int]) -> int:
        """Compute and write the actions of ``envs``, all in one round; returns the rows run.

        Raises:
            PolicyError: if an output is NaN, or not of its shape at start-up; if no output can be
                NaN, and a parameter is.
        """
        slot = self.schedule.slot(round_)
        if self.rounds[slot] != round_:
            self._begin(slot, round_)
        # In Python, which is quicker than numpy with so few.
        steps, interval = self.schedule.steps, self.sync_interval
        rows = np.array([env * interval + steps[env] % interval for env in envs])
        size = self.sizes.pad(len(envs))
        at: Any = np.array(envs) % self.group if self.sizes.fixed_rows else slice(len(envs))
        for buffer, source in zip(self.buffer_rows, self.input_rows[slot], strict=True):
            if self.sizes.fixed_rows:
                buffer[at] = source[rows]
            else:
                source.take(rows, 0, buffer[at], "clip")
        self.batch_noise[at] = self.noise[slot].take(rows, 0)
        result = self._run(self.policies[slot], size)
        for key, target, shape in self.output_rows[slot]:
            written: Any = result[key]
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
            elif isinstance(written, Tensor) and written.dtype == torch.bfloat16:
                total = written.sum().item()
            else:
                total = 0
            if isnan(total):
                self._check_numbers(key, torch.as_tensor(written)[at], slot, envs, rows)
            target[rows] = value
        return size

    def _begin(self, slot: int, round_: int) -> None:
        """A slot has a new round: its noise, and its parameters where they aren't run in place."""
        self.rounds[slot] = round_
        words = self.counter_noise.round(round_)
        rows = self.num_envs * self.sync_interval
        self.noise[slot] = self.policies[slot].noise_of(words.reshape(rows, self.width))
        self._refresh(slot)
        if not self.outputs_tell_nan and (names := self._parameters_with(torch.isnan, slot)):
            raise PolicyError(
                f"the policy's parameters are NaN in {names}, and it returns nothing that would "
                "show what comes of it: check the learning rate"
            )

    def _parameters_with(self, is_bad: Callable[[Tensor], Tensor], slot: int) -> str:
        """Names of the first parameters in which some number is bad; empty if there is none."""
        parameters = self.policies[slot].policy.named_parameters()
        return ", ".join([name for name, tensor in parameters if is_bad(tensor).any()][:3])

    def _check_numbers(
        self,
        key: str | Key,
        value: Tensor,
        slot: int,
        envs: Sequence[int],
        rows: npt.NDArray[np.intp],
    ) -> None:
        """Raise PolicyError if an output is NaN, and say what it comes from.

        Args:
            key: of the output, whose values for ``envs``, at ``rows`` of the slot, are ``value``.
        """
        bad = value.isnan().reshape(len(envs), -1).any(1).cpu().numpy()
        if not bad.any():
            return
        parameters = self._parameters_with(lambda tensor: ~tensor.isfinite(), slot)
        inputs = [
            ".".join(name)
            for name, source in zip(self.inputs, self.input_rows[slot], strict=True)
            if source.dtype.kind == "f" and not np.isfinite(source[rows[bad]]).all()
        ]
        cause = "its parameters and inputs are finite: check the learning rate and the policy"
        if parameters:
            cause = f"not finite are {parameters}: check the learning rate"
        elif inputs:
            cause = f"not finite are its inputs {', '.join(inputs[:3])}: check the environment"
        found = [env for env, is_bad in zip(envs, bad, strict=True) if is_bad]
        raise PolicyError(f"the policy returned NaN in {key!r} for environment(s) {found}; {cause}")

    def _run(self, policy: CounterPolicy, size: int) -> Mapping[Any, Tensor | Array]:
        """Run a policy on the first ``size`` rows of the buffers."""
        views = self.views.get(size)
        if views is None:
            batch = {key: buffer[:size] for key, buffer in self.batch.items()}
            views = self.views[size] = (batch, self.batch_noise[:size])
        values, noise = views
        if self.device.type == "cpu":
            values = dict(values)  # what the policy adds must not stay in the next call's input
        else:
            # From pinned memory, which is next written to when the outputs have come back.
            values = {
                key: value.to(self.device, non_blocking=True) for key, value in values.items()
            }
        return policy.run(values, noise)

    def calibrate(self) -> InvariantSizes:
        """Find the batch sizes that agree bitwise, running just what `infer` runs.

        Large layers are packed, if that works. If all environments' rows would have to be cut into
        several batches, linear layers are tried the other way round.

        Raises:
            PolicyError: if rows aren't independent of each other.
        """
        if self.device.type != "cpu" or self.policies[0].takes_arrays:
            return self._measure()
        found = None
        if len(self.packable[0]) and self.keeps_weights:
            found = self._try(packed=True, transposed=False)
        if found is None or found.fixed_rows:
            self._arrange(packed=False, transposed=False)
            found = self._measure()
        if found.full_size < self.group:
            other = self._try(packed=found.packed, transposed=True)
            if other is not None:
                found = min(found, other, key=lambda sizes: sizes.cost(self.group))
        self._arrange(packed=found.packed, transposed=found.transposed)
        return found

    def _try(self, *, packed: bool, transposed: bool) -> InvariantSizes | None:
        """The batch sizes that agree with layers that are changed so; None if that doesn't work."""
        try:
            self._arrange(packed=packed, transposed=transposed)
            return self._measure()
        except Exception:  # whatever it stumbles over, the policy itself ran
            return None

    def _measure(self) -> InvariantSizes:
        """The batch sizes that agree, with the layers as they are.

        Compared are the outputs and what every module inside passes on: two sizes that round
        differently in some layer often agree in a few outputs, so as many numbers as it takes.

        Raises:
            PolicyError: if rows aren't independent of each other.
        """
        self.refresh_all()
        for number, rows in enumerate(self.trial.kinds(), 1):
            is_last = number == self.trial.num_kinds
            try:
                return self._measure_with(rows, takes_nan=is_last)
            except PolicyError:
                raise
            except Exception:  # the policy refuses what is not real
                if is_last:
                    raise
        raise AssertionError("there is one kind of rows at least")

    def _measure_with(self, examples: TensorDictBase, *, takes_nan: bool) -> InvariantSizes:
        """The batch sizes that agree on some rows.

        Raises:
            PolicyError: if rows aren't independent of each other.
            ValueError: if the policy returns NaN, unless that is taken.
        """
        available = examples.shape[0]
        words = np.random.default_rng(0).integers(
            0, 2**64, (available, self.width), np.uint64, endpoint=False
        )
        sources = [_as_array(examples.get(key)) for key in self.inputs]
        policy = self.policies[0]
        noise = policy.noise_of(words)
        inner: list[Tensor] = []

        def run(row_ids: npt.NDArray[np.int64]) -> list[Tensor]:
            size = len(row_ids)
            for buffer, source in zip(self.buffer_rows, sources, strict=True):
                buffer[:size] = source[row_ids]
            self.batch_noise[:size] = noise[row_ids]
            inner.clear()
            result = self._run(policy, size)
            outputs = [torch.as_tensor(result[key]) for key, _, _ in self.output_rows[0]]
            if not takes_nan and any(value.isnan().any() for value in outputs):
                raise ValueError("NaN")
            outputs += [value for value in inner if value.shape[:1] == (size,)]
            return [v.cpu().clone(memory_format=torch.contiguous_format) for v in outputs]

        with policy.watched(inner.append):
            floats = sum(
                value[0].numel()
                for value in run(np.arange(self.group))
                if value.is_floating_point()
            )
            rows = min(available, max(_CALIBRATION_ROWS, _CALIBRATION_FLOATS // max(floats, 1)))
            sizes = choose_sizes(
                run,
                num_envs=self.group,
                num_rows=rows,
                suspects=mixing_modules(policy.policy),
            )
            if sizes.full_size == self.group < self.num_envs:
                sizes = with_larger(run, sizes, self.num_envs, rows)
        return replace(sizes, packed=self.packed, transposed=self.transposed)

    def refresh_all(self) -> None:
        """Have every slot's policy run with the slot's parameters as they are now."""
        for slot in range(self.num_slots):
            self._refresh(slot)

    def _refresh(self, slot: int) -> None:
        refresh = self.refreshers[slot]
        if refresh is not None:
            refresh()
        if self.packed:
            self.packable[slot].pack()


def _own_copy(module: TensorDictModuleBase) -> TensorDictModuleBase:
    """A copy with parameters of its own, as its device wants them."""
    copy: TensorDictModuleBase = deepcopy(module)
    for layer in copy.modules():
        if isinstance(layer, nn.RNNBase):  # cuDNN's, in one block, which a copy isn't
            layer.flatten_parameters()
    return copy


def _items(td: TensorDictBase) -> list[tuple[Key, Tensor]]:
    return [
        (key if isinstance(key, tuple) else (key,), value)
        for key, value in td.items(include_nested=True, leaves_only=True)
    ]


def _nested(key: Key) -> str | Key:
    """The key as policies write it."""
    return key[0] if len(key) == 1 else key


def _as_array(value: Tensor | Array) -> Array:
    """The values as an array, over a CPU tensor's memory; bfloat16 as 16-bit words, as stored."""
    if isinstance(value, np.ndarray):
        return value
    if value.device.type != "cpu":
        value = value.cpu()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(np.uint16)
    return value.numpy()
