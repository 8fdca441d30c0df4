"""The policy of every slot: copies with the slot's own parameters, and how their layers run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs.utils import ExplorationType

from torchrl_hts._policy.counter_policy import CounterPolicy
from torchrl_hts._policy.numpy_layers import layers_in_numpy
from torchrl_hts._policy.packed_layers import PackedLayers
from torchrl_hts._policy.transposed_layers import transpose_layers
from torchrl_hts._policy.trial_inputs import TrialInputs
from torchrl_hts._processes.messages import unpickled
from torchrl_hts._rounds.keys import Key, as_written
from torchrl_hts._rounds.slots import Slots, bind_parameters

__all__ = ["SlotPolicies"]


class SlotPolicies:
    """A policy for each slot, which runs with the slot's parameters (I2).

    Args:
        slots: the slots, over shared memory.
        policy: the pickled policy, its tensors on the CPU.
        trial: what the policy is tried with.
        outputs: keys that the policy writes and that are stored.
        exploration_type: under which the policy runs.
        device: where it runs.
        most_rows: of a batch.
        groups: see `Layout.groups`.

    Attributes:
        packed: whether large layers run with weights that are put in order once a round.
        transposed: whether linear layers that aren't packed multiply the other way round.
        blocked: whether numpy multiplies rows in blocks.
        may_pack: whether there are large layers, and running the policy left their weights as they
            were.

    Raises:
        PolicyError: see `CounterPolicy.prepare`.
    """

    def __init__(
        self,
        slots: Slots,
        policy: bytes,
        trial: TrialInputs,
        outputs: Sequence[Key],
        *,
        exploration_type: ExplorationType,
        device: torch.device,
        most_rows: int,
        groups: Sequence[tuple[Key, tuple[int, ...]]] = (),
    ) -> None:
        self._groups = groups
        self._trial, self._most_rows, self._device = trial, most_rows, device
        self._outputs = tuple(map(as_written, outputs))
        self._exploration_type = exploration_type
        self.packed = self.transposed = self.blocked = False
        module: TensorDictModuleBase = unpickled(policy).to(device)
        layers_in_numpy(module)
        modules: list[TensorDictModuleBase] = []
        self._refreshers: list[Callable[[], None] | None] = []
        for parameters in slots.parameters:
            modules.append(_own_copy(module))
            self._refreshers.append(bind_parameters(modules[-1], parameters, device))
        self._packable = [PackedLayers(module, most_rows) for module in modules]
        weights = self._packable[0].sources
        before = [weight.clone() for weight in weights]
        self._prepare(modules)
        keeps_weights = all(map(torch.equal, weights, before))
        self.may_pack = keeps_weights and len(self._packable[0]) > 0

    def __getitem__(self, slot: int) -> CounterPolicy:
        return self._policies[slot]

    def _prepare(self, modules: Sequence[TensorDictModuleBase]) -> None:
        """Get the policy of each slot ready to run."""
        self._policies = [
            CounterPolicy(module, self._exploration_type, self._outputs, self._groups)
            for module in modules
        ]
        examples = self._trial.rows(self._most_rows).to(self._device)
        others = next(self._trial.kinds())[: self._most_rows].to(self._device)
        for policy in self._policies:
            policy.prepare(examples, others)

    def arrange(self, *, packed: bool, transposed: bool) -> None:
        """Have large layers packed from now on, and the others transposed, or not."""
        if (packed, transposed) != (self.packed, self.transposed):
            self.packed, self.transposed = packed, transposed
            modules = [policy.policy for policy in self._policies]
            for module, layers in zip(modules, self._packable, strict=True):
                if packed:
                    layers.pack()
                else:
                    layers.unpack()
                transpose_layers(module, transposed)
            self._prepare(modules)

    def forget_trial(self) -> None:
        """Keep no longer what the policy is tried with: layers are arranged for good."""
        del self._trial

    def block(self, blocked: bool) -> None:
        """Have numpy multiply rows in blocks from now on, or not; torch's layers don't change."""
        self.blocked = blocked
        for policy in self._policies:
            policy.block(blocked)

    def refresh(self, slot: int) -> None:
        """Have the policy of a slot run with the slot's parameters as they are now."""
        refresh = self._refreshers[slot]
        if refresh is not None:
            refresh()
        if self.packed:
            self._packable[slot].pack()

    def refresh_all(self) -> None:
        """Have every slot's policy run with the slot's parameters as they are now."""
        for slot in range(len(self._policies)):
            self.refresh(slot)


def _own_copy(module: TensorDictModuleBase) -> TensorDictModuleBase:
    """A copy with parameters of its own, as its device wants them."""
    copy: TensorDictModuleBase = deepcopy(module)
    for layer in copy.modules():
        if isinstance(layer, nn.RNNBase):  # cuDNN's, in one block, which a copy isn't
            layer.flatten_parameters()
    return copy
