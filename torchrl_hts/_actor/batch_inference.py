"""What an actor does with a batch: from the rows of a slot through the policy and back.

The ready rows of one round are gathered from its slot, and padded to a batch size of the calibrated
set. They are run with the slot's own parameters and counter-based noise (I2, I6). What the policy
writes is scattered back.

Axes: N environments, T steps of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType

from torchrl_hts._actor.passes import Passes, Rows
from torchrl_hts._actor.random_rounds import RandomRounds
from torchrl_hts._actor.slot_policies import SlotPolicies
from torchrl_hts._policy.counter_policy import CounterPolicy, generator_states
from torchrl_hts._policy.draws import CounterNoise, Words
from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._policy.trial_inputs import TrialInputs
from torchrl_hts._processes.messages import unpickled
from torchrl_hts._rounds.keys import Key, as_path, as_written
from torchrl_hts._rounds.shared_memory import Array, SharedMemory
from torchrl_hts._rounds.slots import Slots
from torchrl_hts.errors import PolicyError

__all__ = ["BatchInference", "as_array"]

_LOOKS_AT_FIRST, _LOOKS_EVERY = 8, 64  # rounds


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
        random_policy, random_rounds: what acts in so many rounds at first; see `RandomRounds`.

    Attributes:
        schedule: the schedule, over shared words.
        sizes: the batch sizes that agree, see `use`. Before, only the full batch serves.
        policies: of the slots.

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
        random_policy: bytes = b"",
        random_rounds: int = 0,
    ) -> None:
        layout = memory.layout
        self.at_random = RandomRounds(random_policy, random_rounds, layout)
        self.num_envs, self.sync_interval = layout.num_envs, layout.sync_interval
        self.first_env = layout.first_env
        self.num_slots = layout.num_slots
        self.schedule = memory.schedule(last_round)
        self.passes = Passes(self.schedule, layout)
        # Of several learners each runs what one of any number of them would: groups.
        self.group = self.passes.group
        self.sizes = InvariantSizes((self.group,), self.group, fixed_rows=True)
        self.trial: TrialInputs = unpickled(examples)
        self.examples = self.trial.rows(self.group)
        self.device = torch.device(device)
        self.policies = SlotPolicies(
            Slots(memory),
            policy,
            self.trial,
            outputs,
            exploration_type=exploration_type,
            device=self.device,
            most_rows=self.group,
            groups=layout.groups,
        )
        self._lay_out(memory, outputs)
        self.rounds: list[int | None] = [None] * self.num_slots
        self.noise: list[Words] = [self.batch_noise] * self.num_slots

    def _lay_out(self, memory: SharedMemory, outputs: Sequence[Key]) -> None:
        """Arrays over the rows of the slots, and the buffers between them and the policies."""
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
        dtypes = {field.key: field.dtype for field in memory.layout.fields}
        self.output_rows = [
            [
                (as_written(key), slot[key], slot[key].shape[1:], slot[key].dtype, dtypes[key])
                for key in outputs
            ]
            for slot in flat
        ]
        self.outputs_tell_nan = any("float" in dtypes[key] for key in outputs)
        pinned = self.device.type == "cuda"
        # With rows that the policy takes, for padding before there were others.
        buffers = [
            value.pin_memory() if pinned else value
            for _, value in _items(self.trial.rows(self.num_envs))
        ]
        self.buffer_rows = [as_array(buffer) for buffer in buffers]
        self.width = self.policies[0].width
        # Of padded rows as well, before there was anything in them.
        zeros = np.zeros((self.num_envs, self.width), np.uint64)
        self.batch_noise = self.policies[0].noise_of(zeros)
        # What the policy is given of the buffers, which are its own to read alone.
        keys = [as_written(key) for key in self.inputs]
        self.batch = self.policies[0].inputs_of(dict(zip(keys, buffers, strict=True)))
        self.views: dict[int, tuple[dict[Any, Any], Words]] = {}  # first rows, by how many

    def use(self, sizes: InvariantSizes) -> None:
        """Run batches of these sizes from now on, as they were measured."""
        self.policies.arrange(packed=sizes.packed, transposed=sizes.transposed)
        self.policies.block(sizes.blocked)
        self.sizes = sizes

    def forget_trial(self) -> None:
        """Keep no longer what the policy was tried with; the sizes in use stay."""
        del self.trial, self.examples
        self.policies.forget_trial()

    def start(self, seed: int) -> None:
        """Get ready for a run."""
        self.counter_noise = CounterNoise(
            seed, self.num_envs, self.sync_interval, self.width, self.first_env
        )
        self.at_random.start(seed)
        self.rounds = [None] * self.num_slots
        self.drawn_from, self.begun = generator_states(self.device), 0

    def infer(self, round_: int, rows: Rows) -> int:
        """Compute and write the actions of some rows; returns how many were run.

        Args:
            round_: whose rows they are.
            rows: see `Passes`.

        Raises:
            PolicyError: if an output is NaN, or not of its shape at start-up; if no output can be
                NaN, and a parameter is.
        """
        slot = self.schedule.slot(round_)
        if round_ < self.at_random.end:
            return self._draw(slot, round_, rows)
        if self.rounds[slot] != round_:
            self._begin(slot, round_)
        size = self.sizes.pad(len(rows))
        at: Any = slice(len(rows))
        if self.sizes.fixed_rows:
            at = rows // self.sync_interval % self.group
        for buffer, source in zip(self.buffer_rows, self.input_rows[slot], strict=True):
            if self.sizes.fixed_rows:
                buffer[at] = source[rows]
            else:
                source.take(rows, 0, buffer[at], "clip")
        self.batch_noise[at] = self.noise[slot].take(rows, 0)
        result = self.run(self.policies[slot], size)
        for key, target, shape, stored, kind in self.output_rows[slot]:
            written: Any = result[key]
            value = as_array(written)
            if value.shape != (size, *shape):
                raise PolicyError(
                    f"the policy wrote {key!r} of shape {value.shape[1:]} per row, in "
                    f"{len(value)} rows; at start-up it was {shape}, and {size} rows were expected"
                )
            if value.dtype != stored:
                raise PolicyError(
                    f"the policy wrote {key!r} as {written.dtype}; at start-up, on the CPU, it was "
                    f"{kind}. Under autocast, return x.float(), or let it be for any device: "
                    "torch.autocast(x.device.type, ...)"
                )
            value = value[at]
            # One number tells: the sum is NaN where a value is (and where infinities cancel).
            if kind == "bfloat16":
                total = written.sum().item()
            elif "float" in kind:
                total = np.add.reduce(value, None)
            else:
                total = 0
            if isnan(total):
                self._check_numbers(key, torch.as_tensor(written)[at], slot, rows)
            target[rows] = value
        return size

    def _draw(self, slot: int, round_: int, rows: Rows) -> int:
        """Write random actions, and zeros where the policy would write something else.

        What it would read again at the next step stays what it is.
        """
        drawn = self.at_random.actions(round_, rows)
        inputs = dict(zip(self.inputs, self.input_rows[slot], strict=True))
        for key, target, *_ in self.output_rows[slot]:
            value, path = drawn.get(key), as_path(key)
            kept = inputs.get(path[1:] if path[0] == "next" else path)
            if value is not None:
                target[rows] = as_array(value)
            elif kept is None:
                target[rows] = 0
            elif kept is not target:
                target[rows] = kept[rows]
        return len(rows)

    def _begin(self, slot: int, round_: int) -> None:
        """A slot has a new round: its noise, and its parameters where they aren't run in place."""
        self.rounds[slot] = round_
        words = self.counter_noise.round(round_)
        rows = self.num_envs * self.sync_interval
        self.noise[slot] = self.policies[slot].noise_of(words.reshape(rows, self.width))
        self.policies.refresh(slot)
        self.begun += 1
        # It takes as long as a pass of a small network, and what has been drawn stays seen.
        looks = self.begun < _LOOKS_AT_FIRST or self.begun % _LOOKS_EVERY == 0
        if looks and generator_states(self.device) != self.drawn_from:
            raise PolicyError(
                "the policy has drawn from a default generator, of torch, numpy or Python, as it "
                "did not in its trial run: draw in every call, or in none"
            )
        if not self.outputs_tell_nan and (names := self._parameters_with(torch.isnan, slot)):
            raise PolicyError(
                f"the policy's parameters are NaN in {names}, and it returns nothing that would "
                "show what comes of it: check the learning rate"
            )

    def _parameters_with(self, is_bad: Callable[[Tensor], Tensor], slot: int) -> str:
        """Names of the first parameters in which some number is bad; empty if there is none."""
        return _names_with(is_bad, self.policies[slot].policy.named_parameters())

    def _check_numbers(
        self,
        key: str | Key,
        value: Tensor,
        slot: int,
        rows: Rows,
    ) -> None:
        """Raise PolicyError if an output is NaN, and say what it comes from.

        Args:
            key: of the output, whose values at ``rows`` of the slot are ``value``.
        """
        bad = value.isnan().reshape(len(rows), -1).any(1).cpu().numpy()
        if not bad.any():
            return
        parameters = self._parameters_with(lambda tensor: ~tensor.isfinite(), slot)
        buffers = _names_with(torch.isnan, self.policies[slot].policy.named_buffers())
        inputs = [
            ".".join(name)
            for name, source in zip(self.inputs, self.input_rows[slot], strict=True)
            if source.dtype.kind == "f" and not np.isfinite(source[rows[bad]]).all()
        ]
        cause = "its parameters and inputs are finite: check the learning rate and the policy"
        if parameters:
            cause = f"not finite are {parameters}: check the learning rate"
        elif buffers:
            cause = f"NaN is in its buffers {buffers}: check what they are updated with"
        elif inputs:
            cause = f"not finite are its inputs {', '.join(inputs[:3])}: check the environment"
        found = (rows[bad] // self.sync_interval).tolist()
        raise PolicyError(f"the policy returned NaN in {key!r} for environment(s) {found}; {cause}")

    def run(self, policy: CounterPolicy, size: int) -> Mapping[Any, Tensor | Array]:
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


def _names_with(is_bad: Callable[[Tensor], Tensor], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The first names of those in which some number is bad."""
    return ", ".join([name for name, tensor in tensors if is_bad(tensor).any()][:3])


def _items(td: TensorDictBase) -> list[tuple[Key, Tensor]]:
    return [(as_path(key), value) for key, value in td.items(include_nested=True, leaves_only=True)]


def as_array(value: Tensor | Array) -> Array:
    """The values as an array, over a CPU tensor's memory; bfloat16 as 16-bit words, as stored."""
    if isinstance(value, np.ndarray):
        return value
    if value.device.type != "cpu":
        value = value.cpu()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(np.uint16)
    return value.numpy()
