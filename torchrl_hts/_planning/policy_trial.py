"""Trial runs of a policy: what it reads, what it leaves for its next step, and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_hts._planning.policy_advice import on_failure, on_missing
from torchrl_hts._policy.state import (
    PolicyReads,
    check_kept,
    find_reads,
    run_policy,
    same,
    stored_outputs,
)
from torchrl_hts._policy.trial_inputs import TrialInputs
from torchrl_hts._rounds.entries import leaves
from torchrl_hts._rounds.keys import Key, as_path, named
from torchrl_hts.errors import PolicyError

__all__ = ["PolicyTrial", "try_policy"]

_TRIAL_ROWS = 8  # at least


@dataclass(frozen=True)
class PolicyTrial:
    """What trial runs have shown.

    Attributes:
        reads: what the policy reads.
        inputs: TensorDicts of that, to try it with.
        examples: some of them, ``[count]``.
        outputs: by key, what it writes and is stored, ``[count, ...]``.
    """

    reads: PolicyReads
    inputs: TrialInputs
    examples: TensorDictBase
    outputs: dict[Key, Tensor]


def try_policy(
    everything: TrialInputs,
    policy: TensorDictModuleBase,
    num_envs: int,
    kept: set[Key],
    space: gym.Space[Any] | None = None,
) -> PolicyTrial:
    """Run a policy on what there is, and on what it leaves.

    Args:
        everything: all that there is where an episode starts.
        policy: a copy of it on the CPU; to be run under its exploration type, without gradients.
        num_envs: N.
        kept: of it, what is handed on from step to step as the policy leaves it.
        space: the observation space of a gymnasium environment; None for one of TorchRL.

    Raises:
        PolicyError: if the policy fails.
        ValueError: if it reads what is not there, leaves what can't be carried, or changes what
            was observed.
    """
    is_real = everything.real is not None
    run = partial(_try_out, policy, is_real=is_real, space=space)
    made_up = everything.made_up
    count = max(made_up.shape[0], 0 if everything.real is None else everything.real.shape[0])
    reads = find_reads(
        policy,
        everything.rows(count),
        _inputs(policy, made_up, space),
        max(num_envs, _TRIAL_ROWS),
        [made_up] if is_real else [],
    )
    inputs = everything.select(reads.inputs)
    if reads.sources:
        examples = _with_left(inputs.rows(count), reads, run)
        made_up = inputs.made_up
        try:
            made_up = _with_left(made_up, reads, partial(run_policy, policy))
        except Exception:  # it may refuse what is made up
            made_up = made_up.update(examples[: made_up.shape[0]].select(*reads.sources))
        inputs = inputs.extended(examples, made_up, tuple(reads.sources))
    examples = inputs.rows(everything.made_up.shape[0])
    before = examples.clone()
    written = run(examples)
    _check_left_alone(before.exclude(*kept, *reads.sources), examples)
    outputs = stored_outputs(
        policy,
        written,
        examples,
        left={*reads.sources.values()},
        kept=kept,
        handed_on={*kept, *reads.sources},
    )
    for key, value in outputs.items():
        if value.shape[:1] != examples.shape:
            raise ValueError(
                f"the policy wrote {named(key)} of shape {tuple(value.shape)} for a batch of "
                f"{examples.shape[0]} rows; expected one row each"
            )
    check_kept(run, examples, outputs, kept)
    return PolicyTrial(reads, inputs, examples, outputs)


def _with_left(
    rows: TensorDictBase, reads: PolicyReads, run: Callable[[TensorDictBase], TensorDictBase]
) -> TensorDictBase:
    """The same rows, and with them what the policy reads back after two steps."""
    for _ in range(2):
        written = run(rows.copy())
        rows = rows.copy()
        for key, source in reads.sources.items():
            rows.set(key, written.get(source))
    return rows


def _check_left_alone(before: TensorDictBase, after: TensorDictBase) -> None:
    """Raise if a policy has changed observations in place, as it would those of a batch.

    Each pass of a loss over the batch would change them once more.
    """
    for key, value in leaves(before):
        if not same(value, after.get(key)):
            name = named(key)
            raise ValueError(
                f"the policy changes {name} in place, so that each update would change a batch's "
                "observations again: let it compute new values (x = x / 255, not x /= 255)"
            )


def _try_out(
    policy: TensorDictModuleBase,
    inputs: TensorDictBase,
    *,
    is_real: bool,
    space: gym.Space[Any] | None,
) -> TensorDictBase:
    """What the policy writes for some inputs, which an environment gave or which are made up."""
    try:
        return run_policy(policy, inputs.copy())
    except Exception as error:
        given = [f"{named(key)} {v.dtype} {tuple(v.shape)}" for key, v in leaves(inputs)]
        source = (
            "what the environment gave"
            if is_real
            else "random values of its spaces, since it could not be observed,"
        )
        raise PolicyError(
            f"the policy failed in a trial run on {source} ({', '.join(given) or 'none'}): "
            f"{type(error).__name__}: {error}"
            f"{on_failure(error, policy, dict(leaves(inputs)), space)}"
        ) from error


def _inputs(
    policy: TensorDictModuleBase, root: TensorDictBase, space: gym.Space[Any] | None
) -> list[Key]:
    """The policy's input keys, all of which the environment must give."""
    available = {key for key, _ in leaves(root)}
    inputs = []
    for key in policy.in_keys:
        path = as_path(key)
        below = [known for known in available if known[: len(path)] == path]
        written = [out[1:] if out[0] == "next" else out for out in map(as_path, policy.out_keys)]
        remedy = "" if below else on_missing(path, policy)
        if not below and not remedy and any(out[: len(path)] == path for out in written):
            continue  # an entry that the policy fills, for itself ("params") or for its next step
        if not below:
            if space is not None and not remedy:
                remedy = (
                    ". What a policy reads must be in the observation: if it is in info, move it "
                    "there with a gymnasium.Wrapper, as docs/how_to/carry_info.md shows (info_keys "
                    "are for the learner)"
                )
            raise ValueError(
                f"the policy reads {named(path)}, which the environment does not give; it gives "
                f"{', '.join(sorted(map(named, available)))}{remedy}"
            )
        inputs += sorted(below)
    return list(dict.fromkeys(inputs))
