"""What a collector's state dict must look like: all is checked before any of it is taken over."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_hts._executor.space_texts import WITHIN
from torchrl_hts._learner.packing import recut
from torchrl_hts._policy.invariance import InvariantSizes
from torchrl_hts._rounds.shared_memory import Layout
from torchrl_hts._rounds.slots import policy_tensors
from torchrl_hts.errors.checks import check_integer

__all__ = ["own_state", "saved_sizes"]

# The entries of a state dict.
_ENTRIES = frozenset(
    (
        "policy_state_dict", "frames", "iter", "lag", "num_envs", "sync_interval",
        "invariant_sizes", "round", "seed", "static_seed", "behaviour_parameters",
        "staged_parameters", "collected", "environments", "why_environments_are_lost",
    )
)  # fmt: skip


# What the states of all learners of a run have alike.
_ALIKE = ("lag", "sync_interval", "round", "seed", "static_seed")


def own_state(
    state: Any, policy: nn.Module, layout: Layout, spaces: Mapping[str, str]
) -> Mapping[str, Any]:
    """The state of a collector's own environments, checked.

    Args:
        state: its state, or those of all learners of a run, however many there were.
        policy: its policy.
        layout: its sizes.
        spaces: of its environments, in words, by name.

    Raises:
        TypeError, ValueError: the message says which entry is wrong, or what is missing.
    """
    states: list[Mapping[str, Any]]
    if isinstance(state, Mapping) and "learners" in state:  # as `DelayedGradient.register` saves
        state = state["learners"]
    states = list(state) if isinstance(state, (list, tuple)) else [state]
    if not states:
        raise ValueError("no state to go on with: the list is empty")
    for one in states:
        _check_entries(one)
    _check_spaces(states, spaces)
    all_envs = layout.all_envs
    if len(states) == 1:
        place = (_first_env(states[0]), _integer(states[0], "num_envs"))
        if place == (layout.first_env, layout.num_envs) or layout.num_envs == all_envs:
            _check_state(states[0], policy, layout)
            return states[0]
    if len(set(layout.units)) > 1:
        raise ValueError(
            "states of several learners are of entries of create_env_fn that make equally many "
            f"environments; here they make {', '.join(map(str, sorted(set(layout.units))))}"
        )
    size = layout.units[0] if layout.units else 1  # of a batch
    states.sort(key=_first_env)
    for one in states:
        first, count = _first_env(one), _integer(one, "num_envs", least=1)
        if first + count > all_envs:
            raise ValueError(
                f"the state is of environments {first} to {first + count - 1}; this run has "
                f"{all_envs}"
            )
        units = (size,) * (count // size) if layout.units else ()
        _check_state(one, policy, replace(layout, first_env=first, num_envs=count, units=units))
        for name in _ALIKE:
            if one[name] != states[0][name]:
                raise ValueError(
                    f"the states are not of one checkpoint: {name} is {states[0][name]} in one of "
                    f"them and {one[name]} in another"
                )
    return _cut(states, layout, size)


def _cut(states: Sequence[Mapping[str, Any]], layout: Layout, size: int) -> dict[str, Any]:
    """The state of a learner's environments out of checked ones, in the order of environments.

    Args:
        size: how many environments each unit has.
    """
    first, end = layout.first_env, layout.first_env + layout.num_envs
    states = [
        one for one in states if _first_env(one) < end and _first_env(one) + one["num_envs"] > first
    ]
    reached = start = _first_env(states[0]) if states else end
    for one in states:
        if _first_env(one) != reached:
            break
        reached += one["num_envs"]
    if start > first or reached < end:
        raise ValueError(
            f"the states lack some of the environments {first} to {end - 1}, which are this "
            "learner's: give those of all learners of the checkpoint, each once"
        )
    rounds = {len(one["collected"]) for one in states}
    if len(rounds) > 1:
        raise ValueError("the states are not of one checkpoint: they have collected other rounds")
    found = dict(states[0])
    found["num_envs"], found["first_env"] = layout.num_envs, first
    found["all_envs"] = layout.all_envs
    found["frames"] = found["round"] * layout.num_envs * layout.sync_interval
    skipped = first - start
    found["collected"] = [
        recut(packed, reached - start, skipped, layout.num_envs)
        for packed in zip(*(one["collected"] for one in states), strict=True)
    ]
    environments = [one["environments"] for one in states]
    found["environments"] = None
    if None not in environments:
        together = [saved for some in environments for saved in some]
        found["environments"] = together[skipped // size : (skipped + layout.num_envs) // size]
    lost = [one["why_environments_are_lost"] for one in states]
    found["why_environments_are_lost"] = next(filter(None, lost), "")
    return found


def _first_env(state: Mapping[str, Any]) -> int:
    """The number of a state's first environment; a lone learner's begin with 0."""
    return _integer(state, "first_env") if "first_env" in state else 0


def _check_entries(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict must be a mapping, got {type(state).__name__}")
    missing = _ENTRIES - state.keys()
    if missing:
        raise ValueError(
            f"the state lacks {', '.join(sorted(missing))}: it is not one of HTSCollector"
        )


def _check_spaces(states: Sequence[Mapping[str, Any]], spaces: Mapping[str, str]) -> None:
    """Refuse environments of other spaces, as far as all states say: older ones don't."""
    saved = [_entry(one, "spaces", Mapping) if "spaces" in one else {} for one in states]
    if odd := [text for one in saved for text in one.values() if type(text) is not str]:
        kind = type(odd[0]).__name__
        raise TypeError(f"state_dict['spaces'] holds texts as they were saved; got a {kind}")
    for name, here in spaces.items():
        there = {one.get(name, here) for one in saved}
        if len(there) > 1 and WITHIN in name:  # there environments may differ from each other
            continue
        if others := there - {here}:
            raise ValueError(
                f"the state has spaces of environments whose {name} was {others.pop()}; here it is "
                f"{here}. Go on with environments as they were, or begin a new run"
            )


def _check_state(state: Mapping[str, Any], policy: nn.Module, layout: Layout) -> None:
    """Raise if a state dict is not one that a collector of these sizes can go on from."""
    own = {name: getattr(layout, name) for name in ("lag", "num_envs", "sync_interval")}
    own |= {"first_env": layout.first_env, "all_envs": layout.all_envs}
    # A learner that had no others has all environments.
    found = {"first_env": 0, "all_envs": state["num_envs"], **state}
    for name, value in own.items():
        if _integer(found, name) != value:
            raise ValueError(
                f"the state is of a collector with {name}={found[name]}; this one "
                f"has {name}={value}"
            )
    _check_counts(state, layout)
    saved_sizes(state)
    _check_tensors(state["policy_state_dict"], policy.state_dict(), "policy_state_dict")
    own = dict(policy_tensors(policy))
    for round_, parameters in _entry(state, "behaviour_parameters", Mapping).items():
        if not isinstance(round_, int):
            raise TypeError(f"state_dict['behaviour_parameters'] has the round {round_!r}")
        _check_tensors(parameters, own, f"behaviour_parameters'][{round_}]['")
    staged = _entry(state, "staged_parameters", Mapping)
    if "values" not in staged:
        raise ValueError("state_dict['staged_parameters'] lacks 'values'")
    if staged["values"] is not None:
        _check_tensors(staged["values"], own, "staged_parameters']['values")
    _check_collected(state, layout)
    environments = _entry(state, "environments", (list, tuple, type(None)))
    if environments is not None and len(environments) != layout.num_units:
        raise ValueError(
            f"state_dict['environments'] has {len(environments)} states, and there are "
            f"{layout.num_units} {'batches of environments' if layout.units else 'environments'}"
        )
    for index, saved in enumerate(environments or ()):
        _check_bytes(saved, f"['environments'][{index}]")
    _entry(state, "why_environments_are_lost", str)


def _check_counts(state: Mapping[str, Any], layout: Layout) -> None:
    frames, round_ = _integer(state, "frames"), _integer(state, "round")
    iteration = _integer(state, "iter", least=-1)
    batch = layout.num_envs * layout.sync_interval
    if not (round_ == iteration + 1 and frames == round_ * batch < 2**62):
        raise ValueError(
            f"the state's frames={frames}, iter={iteration} and round={round_} don't fit: after "
            f"iteration i comes round i + 1, and so many batches of {batch} frames were collected"
        )
    _integer(state, "seed")
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
    for index, compressed in enumerate(collected):
        where = f"['collected'][{index}]"
        if not isinstance(compressed, Mapping):
            raise TypeError(f"state_dict{where} must be a mapping, got {type(compressed).__name__}")
        sizes = {}
        for name, value in compressed.items():
            _check_bytes(value, f"{where}[{name!r}]")
            sizes[name] = _decompressed_size(value, expected.get(name, 0), f"{where}[{name!r}]")
        if sizes != expected:
            wrong = sorted({str(name) for name, _ in sizes.items() ^ expected.items()})
            raise ValueError(
                "the state is of a collector of other environments or of another policy: "
                f"missing, unknown or of another shape in state_dict{where} are {', '.join(wrong)}"
            )


def _decompressed_size(compressed: Tensor, expected: int, where: str) -> int:
    """Never unpacks much more than is expected."""
    decompressor = zlib.decompressobj()
    try:
        size = len(decompressor.decompress(bytes(compressed.cpu().numpy().data), expected + 1))
    except zlib.error as error:
        raise ValueError(f"state_dict{where} is damaged: {error}") from error
    if size == expected and not decompressor.eof:
        raise ValueError(f"state_dict{where} is damaged: its end is missing")
    return size


def _check_bytes(value: Any, where: str) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
        raise TypeError(f"state_dict{where} must be a tensor of bytes, got {_kind(value)}")


def _check_tensors(found: Any, expected: Mapping[str, Any], name: str) -> None:
    """Tensors by name, of given shapes, and whatever else there is, by its name alone."""
    if not isinstance(found, Mapping):
        raise TypeError(f"state_dict['{name}'] must be a mapping, got {_kind(found)}")
    shapes, own = (
        {key: value.shape if isinstance(value, Tensor) else None for key, value in each.items()}
        for each in (found, expected)
    )
    wrong = sorted({str(key) for key, _ in shapes.items() ^ own.items()})
    if wrong:
        raise ValueError(
            f"state_dict['{name}'] is of another policy: missing, unknown or of another shape are "
            f"{', '.join(wrong)}"
        )


def _integer(state: Mapping[str, Any], name: str, least: int = 0) -> int:
    return check_integer(f"state_dict[{name!r}]", state[name], least=least, most=None)


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
    # Of before layers could be run otherwise.
    hows = ("packed", "transposed", "blocked")
    flags = {**dict.fromkeys(hows, False), **sizes}
    for name in ("fixed_rows", *hows):
        _entry(flags, name, bool, "['invariant_sizes']")
    values = tuple(sizes["sizes"])
    try:
        return InvariantSizes(
            values,
            max(values, default=0),
            flags["fixed_rows"],
            **{name: flags[name] for name in hows},
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
