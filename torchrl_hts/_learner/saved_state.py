"""What a collector's state dict must look like: all is checked before any of it is taken over."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._rounds.shared_memory import Layout
from torchrl_hts._rounds.slots import policy_tensors

__all__ = ["check_state", "saved_sizes"]

# The entries of a state dict.
_ENTRIES = frozenset(
    (
        "policy_state_dict", "frames", "iter", "lag", "num_envs", "sync_interval",
        "invariant_sizes", "round", "seed", "static_seed", "behaviour_parameters",
        "staged_parameters", "collected", "environments", "why_environments_are_lost",
    )
)  # fmt: skip


def check_state(state: Any, policy: nn.Module, layout: Layout) -> None:
    """Raise if a state dict is not one that a collector of these sizes can go on from.

    Raises:
        TypeError, ValueError: the message says which entry is wrong.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict must be a mapping, got {type(state).__name__}")
    missing = _ENTRIES - state.keys()
    if missing:
        raise ValueError(
            f"the state lacks {', '.join(sorted(missing))}: it is not one of HTSCollector"
        )
    for name in ("lag", "num_envs", "sync_interval"):
        if _integer(state, name) != getattr(layout, name):
            raise ValueError(
                f"the state is of a collector with {name}={state[name]}; this one has "
                f"{name}={getattr(layout, name)}"
            )
    _check_counts(state, layout)
    saved_sizes(state)
    _check_tensors(
        _entry(state, "policy_state_dict", Mapping),
        {n: value for n, value in policy.state_dict().items() if isinstance(value, Tensor)},
        "policy_state_dict",
        others=True,
    )
    own = dict(policy_tensors(policy))
    for round_, parameters in _entry(state, "behaviour_parameters", Mapping).items():
        if not isinstance(round_, int):
            raise TypeError(f"state_dict['behaviour_parameters'] has the round {round_!r}")
        _check_tensors(parameters, own, f"behaviour_parameters'][{round_}]['")
    staged = _entry(state, "staged_parameters", Mapping)
    if not {"values", "keep"} <= staged.keys():
        raise ValueError("state_dict['staged_parameters'] lacks 'values' or 'keep'")
    _entry(staged, "keep", bool, "['staged_parameters']")
    if staged["values"] is not None:
        _check_tensors(staged["values"], own, "staged_parameters']['values")
    _check_collected(state, layout)
    environments = _entry(state, "environments", (list, tuple, type(None)))
    if environments is not None and len(environments) != layout.num_envs:
        raise ValueError(
            f"state_dict['environments'] has {len(environments)} states, and there are "
            f"{layout.num_envs} environments"
        )
    for index, saved in enumerate(environments or ()):
        _check_bytes(saved, f"['environments'][{index}]")
    _entry(state, "why_environments_are_lost", str)


def _check_counts(state: Mapping[str, Any], layout: Layout) -> None:
    frames, iteration, round_ = (_integer(state, name) for name in ("frames", "iter", "round"))
    batch = layout.num_envs * layout.sync_interval
    if not (round_ == iteration + 1 >= 0 and frames == round_ * batch < 2**62):
        raise ValueError(
            f"the state's frames={frames}, iter={iteration} and round={round_} don't fit: after "
            f"iteration i comes round i + 1, and so many batches of {batch} frames were collected"
        )
    if _integer(state, "seed") < 0:
        raise ValueError(f"state_dict['seed'] must be at least 0, got {state['seed']}")
    _entry(state, "static_seed", bool)


def _check_collected(state: Mapping[str, Any], layout: Layout) -> None:
    collected = _entry(state, "collected", (list, tuple))
    if len(collected) > layout.num_slots:
        raise ValueError(
            f"state_dict['collected'] has {len(collected)} batches; a lag of {layout.lag} leaves "
            f"at most {layout.num_slots}"
        )
    transitions = layout.num_envs * layout.sync_interval
    expected = {"/".join(field.key): field.num_bytes * transitions for field in layout.fields}
    for index, packed in enumerate(collected):
        where = f"['collected'][{index}]"
        if not isinstance(packed, Mapping):
            raise TypeError(f"state_dict{where} must be a mapping, got {type(packed).__name__}")
        sizes = {}
        for name, value in packed.items():
            _check_bytes(value, f"{where}[{name!r}]")
            sizes[name] = _unpacked_size(value, expected.get(name, 0), f"{where}[{name!r}]")
        if sizes != expected:
            wrong = sorted({str(name) for name, _ in sizes.items() ^ expected.items()})
            raise ValueError(
                "the state is of a collector of other environments or of another policy: "
                f"missing, unknown or of another shape in state_dict{where} are {', '.join(wrong)}"
            )


def _unpacked_size(packed: Tensor, expected: int, where: str) -> int:
    """Never unpacks much more than is expected."""
    unpacker = zlib.decompressobj()
    try:
        size = len(unpacker.decompress(bytes(packed.cpu().numpy().data), expected + 1))
    except zlib.error as error:
        raise ValueError(f"state_dict{where} is damaged: {error}") from error
    if size == expected and not unpacker.eof:
        raise ValueError(f"state_dict{where} is damaged: its end is missing")
    return size


def _check_bytes(value: Any, where: str) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
        raise TypeError(f"state_dict{where} must be a tensor of bytes, got {_kind(value)}")


def _check_tensors(
    found: Any, expected: Mapping[str, Tensor], name: str, *, others: bool = False
) -> None:
    """Tensors by name, of given shapes; there may be others that are no tensors."""
    if not isinstance(found, Mapping):
        raise TypeError(f"state_dict['{name}'] must be a mapping, got {_kind(found)}")
    shapes = {key: value.shape for key, value in found.items() if isinstance(value, Tensor)}
    own = {key: value.shape for key, value in expected.items()}
    strange = [] if others else [key for key in found if key not in shapes]
    wrong = sorted({str(key) for key, _ in shapes.items() ^ own.items()}.union(map(str, strange)))
    if wrong:
        raise ValueError(
            f"state_dict['{name}'] is of another policy: missing, unknown or of another shape are "
            f"{', '.join(wrong)}"
        )


def _integer(state: Mapping[str, Any], name: str) -> int:
    value = _entry(state, name, Integral)
    if isinstance(value, bool):
        raise TypeError(f"state_dict[{name!r}] must be an int, got {value!r}")
    return int(value)


def saved_sizes(state: Mapping[str, Any]) -> InvariantSizes:
    """The batch sizes that agreed where a state was taken.

    Raises:
        TypeError, ValueError: the message says which entry is wrong.
    """
    sizes = _entry(state, "invariant_sizes", Mapping)
    if not {"sizes", "fixed_rows"} <= sizes.keys():
        raise ValueError("state_dict['invariant_sizes'] lacks 'sizes' or 'fixed_rows'")
    _entry(sizes, "sizes", (list, tuple), "['invariant_sizes']")
    if not all(isinstance(size, int) for size in sizes["sizes"]):
        raise TypeError("state_dict['invariant_sizes']['sizes'] must be integers")
    # Of before layers could be packed or transposed.
    flags = {"packed": False, "transposed": False, **sizes}
    for name in ("fixed_rows", "packed", "transposed"):
        _entry(flags, name, bool, "['invariant_sizes']")
    values = tuple(sizes["sizes"])
    try:
        return InvariantSizes(
            values,
            max(values, default=0),
            flags["fixed_rows"],
            packed=flags["packed"],
            transposed=flags["transposed"],
        )
    except ValueError as error:
        raise ValueError(f"state_dict['invariant_sizes'] can't be: {error}") from error


def _entry(
    state: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: str = ""
) -> Any:
    value = state[name]
    if not isinstance(value, kind):
        raise TypeError(f"state_dict{where}[{name!r}] can't be {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    kinds: Sequence[type] = (int, float, str, bool, type(None))
    return repr(value) if type(value) in kinds else f"a {type(value).__name__}"
