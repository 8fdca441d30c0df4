"""What a policy reads besides what it declares, and what it leaves for its own next step.

TorchRL's collectors hand the whole TensorDict of a step on to the next one. So a policy may read
back whatever it wrote: Ornstein-Uhlenbeck noise, the noise of gSDE, a counter, its last action.
Slots carry what they have to. What that is can't be known from `in_keys`, which are no more than a
promise. So the policy is run: with all that there is, and with one entry after the other taken
away.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_hts._policy.row_bits import row_bits
from torchrl_hts._policy.steps import flatten
from torchrl_hts._rounds.entries import is_private, leaves
from torchrl_hts._rounds.keys import Key, as_path, named
from torchrl_hts.errors import PolicyError

__all__ = ["PolicyReads", "check_kept", "find_reads", "run_policy", "same", "stored_outputs"]

_Values = Mapping[Key, Any]

_REMEDY = (
    "Give its first value with a torchrl.envs.TensorDictPrimer (for gSDE: gSDENoise with state_dim "
    "and action_dim) among the transforms of a TorchRL environment"
)

_REMEDY_OF_STATE = f"{_REMEDY}: a recurrent module's make_tensordict_primer() makes one"
_REMEDY_OF_ACTION = (
    "Write it twice, also as last_action, and give that a torchrl.envs.TensorDictPrimer"
)


@dataclass(frozen=True)
class PolicyReads:
    """What a policy reads.

    Attributes:
        inputs: of what it is given, declared or not.
        sources: by the key of each entry that it reads back, the key that it writes it under: the
            same, or ``("next", *key)``. Zero where an episode starts.
    """

    inputs: tuple[Key, ...]
    sources: Mapping[Key, Key]


def run_policy(policy: TensorDictModuleBase, td: TensorDictBase) -> TensorDictBase:
    """Run a policy and return `td` with all that it wrote, in `td` itself or in another one."""
    out = policy(td)
    return td if out is td else td.update(out)


def find_reads(
    policy: TensorDictModuleBase,
    root: TensorDictBase,
    declared: Sequence[Key],
    rows: int,
    others: Sequence[TensorDictBase] = (),
) -> PolicyReads:
    """Find out what a policy reads; run under its exploration type, and without gradients.

    Args:
        policy: on the CPU; copies of it are run.
        root: all that there is where an episode starts, ``[count]``, with different rows.
        declared: keys of `root` that it is known to read.
        rows: that it is run with, at most.
        others: the same with rows that differ more, and that the policy may refuse.

    Raises:
        ValueError: for what it reads back and can't be carried, by name.
        PolicyError: if it fails on what it left itself.
    """
    given = dict(_leaves(root))
    missing = [key for key in map(as_path, policy.in_keys) if not _below(key, given)]
    if not missing and flatten(policy) is not None:
        return PolicyReads(tuple(declared), {})  # of plain modules the promise is kept
    rows = max(1, min(rows, root.shape[0] - 2))  # so that there are others, too
    search = _Search(policy, given, declared, rows)
    needed = search.look()
    for other in others:
        with contextlib.suppress(Exception):
            needed |= _Search(policy, dict(_leaves(other)), declared, rows).look()
    return search.checked(needed)


def stored_outputs(
    policy: TensorDictModuleBase,
    written: TensorDictBase,
    inputs: TensorDictBase,
    *,
    left: set[Key],
    kept: set[Key],
    handed_on: Collection[Key],
) -> dict[Key, Tensor]:
    """What of the policy's outputs is stored: but for what is private, all that it writes.

    Args:
        policy: the policy.
        written: what `run_policy` returned for
        inputs: these.
        left: the keys of what it leaves for its next step, private ones too;
        kept: of what the environment's primers, or its own, hand on.
        handed_on: of all in `inputs` that comes from the step before.
    """
    declared = list(map(as_path, policy.out_keys))
    # It may write more than its out_keys say, and TorchRL's collectors keep that. What it was given
    # counts as written if it says so, or has changed it: recurrent modules put copies of it back.
    read = [key for key, _ in leaves(inputs)]
    back = [
        key
        for key in read
        if not any(key[: len(path)] == path for path in declared)
        and (key in handed_on or same(written.get(key, None), inputs[key]))
    ]
    outputs = {
        key: value
        for key, value in leaves(written.exclude(*back), "policy")
        if key in kept or not (is_private(key) or value is inputs.get(key, None))  # as it was given
    }
    for key in {*left, *kept} - outputs.keys():
        value = written.get(key, None)
        if isinstance(value, Tensor) and (key in left or value is not inputs.get(key, None)):
            outputs[key] = value
    return outputs


def check_kept(
    run: Callable[[TensorDictBase], TensorDictBase],
    inputs: TensorDictBase,
    outputs: Mapping[Key, Tensor],
    kept: Iterable[Key],
) -> None:
    """Raise if the policy leaves something else than what its primer sets.

    Args:
        run: runs it.
        inputs: of a trial run, with what primers set, and
        outputs: what came of it.
        kept: keys of what primers set.

    Raises:
        ValueError: it names the entry, and what to change.
    """
    sources = {key: of for key in kept for of in (key, ("next", *key)) if of in outputs}
    sources = {key: of for key, of in sources.items() if inputs.get(key, None) is not None}
    if not sources:
        return
    start = inputs.copy()
    for key in sources:
        start.set(key, torch.zeros_like(start.get(key)))  # as primers do, unless told otherwise
    found = run(start)
    for key, source in sources.items():
        expected = inputs.get(key)
        for value in (outputs[source], found.get(source)):
            if value.shape != expected.shape or value.dtype != expected.dtype:
                raise ValueError(
                    f"the policy writes {named(source)} as {_kind(value[0])}, and its primer sets "
                    f"{named(key)} to {_kind(expected[0])}: give the primer the shape and data "
                    "type that the policy writes (gSDENoise: state_dim and action_dim)"
                )


class _Search:
    """Runs of copies of a policy on few rows; see `find_reads`."""

    def __init__(
        self,
        policy: TensorDictModuleBase,
        given: Mapping[Key, Tensor],
        declared: Sequence[Key],
        rows: int,
    ) -> None:
        self.policy, self.given, self.declared, self.rows = policy, given, declared, rows
        # What it leaves after one step and after two, and under which keys.
        self.once: _Values = {}
        self.twice: _Values = {}
        self.sources: Mapping[Key, Key] = {}

    def look(self) -> set[Key]:
        """The keys that it reads: of what is given, and of what it has left."""
        first, error = self._run(self._present(1), seed=1)
        if first is None:
            self._complain_of_missing(error)
            self._complain_of_undeclared(error)
            return set(self.declared)  # the error is met again, and told, by the trial run
        self.once = self._left(first)
        second, error = self._run({**self._present(2), **self.once}, seed=2)
        if second is None:
            names = ", ".join(map(named, self.once))
            raise PolicyError(
                "the policy runs, but fails on what it has left for its next step, of which "
                f"TorchRL's collectors keep {names}: {type(error).__name__}: {error}"
            ) from error
        self.twice, self.sources = self._left(second), self._sources(second)
        return self._needed(self.twice)

    def checked(self, needed: Collection[Key]) -> PolicyReads:
        """What it reads, if all of that can be carried; see `find_reads`."""
        sources = {key: source for key, source in self.sources.items() if key in needed}
        for key in sources:
            self._check_carries(key, self.once.get(key), self.twice[key])
        inputs = tuple(key for key in self.given if key in needed)
        self._check_starts(inputs, {key: self.twice[key] for key in sources})
        return PolicyReads(inputs, sources)

    def _present(self, shift: int, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        """Rows of what is given, other ones for another shift; half of them start an episode."""
        present = {}
        for key in self.given if keys is None else keys:
            count = self.given[key].shape[0]
            start = shift % (count - self.rows + 1)
            value = self.given[key][start : start + self.rows]
            if _marks_start(key, value):
                even = (torch.arange(self.rows) % 2 == 0).view(-1, *[1] * (value.ndim - 1))
                value = even.expand(value.shape)
            present[key] = value
        return present

    def _run(self, values: _Values, seed: int) -> tuple[dict[Key, Any] | None, Exception | None]:
        """All that is there after a run, or None and why it failed; the same for the same."""
        td = TensorDict({}, [self.rows])
        for key, value in values.items():
            td.set(key, value.clone())
        torch.manual_seed(seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return dict(_leaves(run_policy(deepcopy(self.policy), td))), None
        except Exception as error:
            return None, error

    def _sources(self, out: _Values) -> dict[Key, Key]:
        """What a TorchRL collector hands on of a step, but for what the environment writes anew."""
        kept = {key: key for key in out if key[0] != "next" and key not in self.given}
        moved = {key[1:]: key for key in out if key[0] == "next" and key[1:] not in self.given}
        return kept | moved

    def _left(self, out: _Values) -> dict[Key, Any]:
        return {key: out[source] for key, source in self._sources(out).items()}

    def _needed(self, left: _Values) -> set[Key]:
        """The keys without which the policy writes something else."""
        known = self._present(0, self.declared)
        everything = {**self._present(0), **left}
        full, _ = self._run(everything, seed=3)
        again, _ = self._run(everything, seed=3)
        if full is None:
            return set(known)
        written = [key for key in full if not same(full[key], everything.get(key))]

        def changes(values: _Values) -> bool:
            found, _ = self._run(values, seed=3)
            return found is None or not all(same(full[key], found.get(key)) for key in written)

        # What is never twice the same is refused where it is prepared.
        if again is None or not all(same(full[key], again.get(key)) for key in full):
            return set(known)
        if not changes(known):
            return set(known)
        kept = everything
        for group in ([key for key in self.given if key not in known], list(left)):
            without = {key: value for key, value in kept.items() if key not in group}
            if not changes(without):
                kept = without
                continue
            for key in group:
                without = {other: value for other, value in kept.items() if other != key}
                if not changes(without):
                    kept = without
        return set(kept)

    def _check_carries(self, key: Key, once: Any, twice: Any) -> None:
        """Raise if a slot can't hold what the policy reads back."""
        for value in (once, twice):
            if not isinstance(value, Tensor) or value.shape[:1] != (self.rows,):
                raise ValueError(
                    f"the policy reads back {named(key)}, which it left in the step before, and "
                    f"which is {_kind(value)}; what HTSCollector can carry from step to step is a "
                    "tensor with a row for each environment"
                )
        if once.shape != twice.shape or once.dtype != twice.dtype:
            raise ValueError(
                f"the policy reads back {named(key)}, which it left in the step before, and which "
                f"is {_kind(once)} after one step and {_kind(twice)} after two; what HTSCollector "
                "can carry from step to step keeps its shape and data type"
            )

    def _check_starts(self, inputs: Sequence[Key], left: Mapping[Key, Tensor]) -> None:
        """Raise if zeros are something else for the policy than the absence of what it leaves."""
        if not left:
            return
        start = {
            key: torch.ones_like(value) if _marks_start(key, value) else value
            for key, value in self._present(0, inputs).items()
        }
        absent, _ = self._run(start, seed=4)
        zeros = {key: torch.zeros_like(value) for key, value in left.items()}
        zeroed, _ = self._run({**start, **zeros}, seed=4)
        if (
            absent is None
            or zeroed is None
            or not all(same(value, zeroed.get(key)) for key, value in absent.items())
        ):
            names = " and ".join(map(named, left))
            raise ValueError(
                f"the policy reads back {names}, which it left in the step before, and does "
                "something else with zeros than where there is nothing yet; HTSCollector starts "
                f"an episode with zeros. {_REMEDY}"
            )

    def _complain_of_undeclared(self, error: Exception | None) -> None:
        """Raise if the policy fails on what it is given, and doesn't declare to read."""
        for key in self.given:
            others = {other: value for other, value in self._present(1).items() if other != key}
            if key not in self.declared and self._run(others, seed=1)[0] is not None:
                raise ValueError(
                    f"the policy reads {named(key)}, though its in_keys don't say so, and fails on "
                    f"what is given there: {type(error).__name__}: {error}. Rename it in the "
                    "environment, or give it what it expects"
                ) from error

    def _complain_of_missing(self, error: Exception | None) -> None:
        """Raise if the policy fails for want of what it is to leave itself."""
        left = [
            path[1:] if path[0] == "next" else path for path in map(as_path, self.policy.out_keys)
        ]
        for key in map(as_path, self.policy.in_keys):
            if key in left and not _below(key, self.given):
                of_action = key == ("action",)
                raise ValueError(
                    f"the policy reads {named(key)}, which it writes for its next step itself, and "
                    f"fails where there is none yet: {type(error).__name__}: {error}. "
                    f"{_REMEDY_OF_ACTION if of_action else _REMEDY_OF_STATE}"
                ) from error


def _leaves(td: TensorDictBase) -> Iterable[tuple[Key, Any]]:
    """All entries with their keys as tuples, also those that are no tensors."""
    for key, value in td.items(include_nested=True, leaves_only=True):
        yield as_path(key), value


def _below(path: Key, keys: Iterable[Key]) -> bool:
    """Whether one of the keys is the path, or lies below it."""
    return any(key[: len(path)] == path for key in keys)


def _marks_start(key: Key, value: Tensor) -> bool:
    return key[-1] == "is_init" and value.dtype == torch.bool


def same(value: Any, other: Any) -> bool:
    """Whether two entries are the same, bit for bit."""
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return type(value) is type(other) and bool(np.all(value == other))
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    return not value.numel() or np.array_equal(row_bits([value[None]]), row_bits([other[None]]))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return "not there" if value is None else f"a {type(value).__name__}"
