"""Which batch sizes give the same bits, found out by running just what an actor runs.

Axes: D example rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_hts._actor.batch_inference import BatchInference, as_array
from torchrl_hts._policy.invariance import (
    InvariantSizes,
    choose_sizes,
    with_larger,
)
from torchrl_hts._policy.module_checks import mixing_modules
from torchrl_hts.errors import PolicyError

__all__ = ["calibrate", "measure"]

# How much is compared, at least: rows, and numbers where a row has few.
_ROWS = 64
_FLOATS = 8192


def calibrate(actor: BatchInference) -> InvariantSizes:
    """Find the batch sizes that agree bitwise, running just what `infer` runs.

    Large layers are packed, if that works. If all environments' rows would have to be cut into
    several batches, linear layers are tried the other way round. In numpy, products are tried in
    blocks, if rows have to be cut or stand in places of their own. The actor is left with its
    layers as they were measured.

    Raises:
        PolicyError: if rows aren't independent of each other.
    """
    policies = actor.policies
    if policies[0].takes_arrays:
        return _in_numpy(actor)
    if actor.device.type != "cpu":
        return measure(actor)
    found = None
    if policies.may_pack:
        found = _try(actor, packed=True, transposed=False)
    if found is None or found.fixed_rows:
        policies.arrange(packed=False, transposed=False)
        found = measure(actor)
    if found.full_size < actor.group:
        other = _try(actor, packed=found.packed, transposed=True)
        if other is not None:
            found = min(found, other, key=lambda sizes: sizes.cost(actor.group))
    policies.arrange(packed=found.packed, transposed=found.transposed)
    return found


def _in_numpy(actor: BatchInference) -> InvariantSizes:
    """The batch sizes that agree where numpy runs the policy, its products in blocks or whole."""
    found = measure(actor)
    if found.fixed_rows or found.full_size < actor.group:
        actor.policies.block(True)
        found = min(found, measure(actor), key=lambda sizes: sizes.cost(actor.group))
        actor.policies.block(found.blocked)
    return found


def _try(actor: BatchInference, *, packed: bool, transposed: bool) -> InvariantSizes | None:
    """The batch sizes that agree with layers that are changed so; None if that doesn't work."""
    try:
        actor.policies.arrange(packed=packed, transposed=transposed)
        return measure(actor)
    except Exception:  # whatever it stumbles over, the policy itself ran
        return None


def _rowwise(
    run: Callable[[npt.NDArray[np.int64]], object], inner: list[Tensor], group: int
) -> tuple[int, list[int]]:
    """How many tensors layers pass on, and which of them have a row for each of the batch.

    Args:
        run: runs such rows, and leaves in `inner` what layers pass on.
        inner: of the last run.
        group: the largest number of rows.
    """
    run(np.arange(group))
    many = [value.shape[:1] == (group,) for value in inner]
    fewer = max(1, group - 1)
    try:
        run(np.arange(fewer))
    except Exception:  # as a policy may that takes so many rows and no fewer
        return len(many), [index for index, whole in enumerate(many) if whole]
    few = [value.shape[:1] == (fewer,) for value in inner]
    if len(many) != len(few):  # each row was run alone
        return 0, []
    return len(many), [index for index, both in enumerate(zip(many, few, strict=True)) if all(both)]


def measure(actor: BatchInference) -> InvariantSizes:
    """The batch sizes that agree, with the layers as they are.

    Compared are the outputs and what every module inside passes on. Two sizes that round
    differently in some layer often agree in a few outputs, so it takes many numbers.

    Raises:
        PolicyError: if rows aren't independent of each other.
    """
    actor.policies.refresh_all()
    for number, rows in enumerate(actor.trial.kinds(), 1):
        is_last = number == actor.trial.num_kinds
        try:
            return _measure_with(actor, rows, takes_nan=is_last)
        except PolicyError:
            raise
        except Exception:  # the policy refuses what is not real
            if is_last:
                raise
    raise AssertionError("there is one kind of rows at least")


def _measure_with(
    actor: BatchInference, examples: TensorDictBase, *, takes_nan: bool
) -> InvariantSizes:
    """The batch sizes that agree on some rows.

    Args:
        actor: whose policy is run.
        examples: TensorDict ``[D]`` of these rows.
        takes_nan: whether the policy may return NaN.

    Raises:
        PolicyError: if rows aren't independent of each other.
        ValueError: if the policy returns NaN, unless that is taken.
    """
    available = examples.shape[0]
    words = np.random.default_rng(0).integers(
        0, 2**64, (available, actor.width), np.uint64, endpoint=False
    )
    sources = [as_array(examples.get(key)) for key in actor.inputs]
    policy = actor.policies[0]
    noise = policy.noise_of(words)
    inner: list[Tensor] = []

    def run(row_ids: npt.NDArray[np.int64]) -> list[Tensor]:
        size = len(row_ids)
        for buffer, source in zip(actor.buffer_rows, sources, strict=True):
            buffer[:size] = source[row_ids]
        actor.batch_noise[:size] = noise[row_ids]
        inner.clear()
        result = actor.run(policy, size)
        outputs = [torch.as_tensor(result[key]) for key, *_ in actor.output_rows[0]]
        if not takes_nan and any(value.isnan().any() for value in outputs):
            raise ValueError("NaN")
        if len(inner) == num_inner:
            outputs += [inner[index] for index in rowwise]
        return outputs

    # Of what layers pass on those whose first axis is the rows: no layers, tokens or members.
    num_inner, rowwise = 0, list[int]()
    with policy.watched(inner.append):
        num_inner, rowwise = _rowwise(run, inner, actor.group)
        floats = sum(
            value[0].numel() for value in run(np.arange(actor.group)) if value.is_floating_point()
        )
        rows = min(available, max(_ROWS, _FLOATS // max(floats, 1)))
        sizes = choose_sizes(
            run, num_envs=actor.group, num_rows=rows, suspects=mixing_modules(policy.policy)
        )
        if sizes.full_size == actor.group < actor.num_envs:
            sizes = with_larger(run, sizes, actor.num_envs, rows)
    policies = actor.policies
    return replace(
        sizes, packed=policies.packed, transposed=policies.transposed, blocked=policies.blocked
    )
