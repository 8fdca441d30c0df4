"""What a checkpoint says of a run beside its parts, and whether another run can go on from it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from support.errors import RecipeError
from support.options import RunOptions, differences
from torchrl_hts import HTSError

__all__ = [
    "FORMAT",
    "Stateful",
    "check_fits",
    "machine",
    "other_versions",
    "random_states",
    "set_random_states",
    "starts_of",
    "take_on",
    "versions",
    "why_other_bits",
    "with_this_start",
]

FORMAT = 2  # of checkpoints
_PACKAGES = (
    *("torchrl_hts", "torch", "torchrl", "tensordict", "gymnasium", "numpy"),
    *("ale-py", "opencv-python", "opencv-python-headless", "envpool", "gfootball"),
    *("mujoco", "vmas", "minatar"),
)


class Stateful(Protocol):
    """What a checkpoint can hold."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def take_on(
    state: Mapping[str, Any],
    file: Path,
    *,
    recipe: str,
    options: RunOptions,
    parts: Mapping[str, Stateful],
    own: Collection[str],
    of_learners: Callable[[], Sequence[Mapping[str, Any]]],
    learners: int,
) -> None:
    """Go on with a checkpoint.

    Args:
        state: of the checkpoint.
        file: that it was in.
        recipe, options, learners: of this run.
        parts: of this run, by name.
        own: names of those that each learner has of its own environments; they are given a list.
        of_learners: gives the parts of those learners that had these environments.

    Raises:
        RecipeError: if a run could not go on from it; the message says what doesn't fit.
    """
    try:
        where = f"the checkpoint in {file.parent}"
        _check(state, where, recipe, options, parts)
        _check_learners(state, where, options, learners, own)
        theirs = of_learners()
        for name, part in parts.items():
            of_all = state["parts"][name]
            part.load_state_dict([each[name] for each in theirs] if name in own else of_all)
        set_random_states(state["random_states"])
        for name in ("id", "step", "rows", "elapsed_s"):
            state[name]
    except HTSError:  # which says what is wrong
        raise
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        said = [*str(error).strip().splitlines(), ""][0]
        raise RecipeError(
            f"{file} is damaged, or of another version ({type(error).__name__}: {said}): resume "
            "with the version that made it, or move it away to go on from the one before"
        ) from error


def _check(
    state: Mapping[str, Any],
    where: str,
    recipe: str,
    options: RunOptions,
    parts: Mapping[str, Stateful],
) -> None:
    if state.get("format") != FORMAT or state.get("recipe") != recipe:
        raise RecipeError(
            f"{where} is of recipe {state.get('recipe')!r}, format {state.get('format')}; this "
            f"is {recipe!r}, format {FORMAT}: resume with what made it"
        )
    changed = differences(state["options"], options)
    if changed:
        raise RecipeError(
            f"{where} is of another configuration: {'; '.join(changed)}. Put the run's config.json "
            "back as it was, or begin anew with another --output-dir"
        )
    if state["parts"].keys() != {*parts, "evaluations"}:  # those are the first learner's alone
        raise RecipeError(
            f"{where} holds {', '.join(state['parts'])}; this run has {', '.join(parts)}"
        )
    collector: Any = parts["collector"]
    check_fits(collector.policy, state["parts"]["collector"]["policy_state_dict"], where)
    other = other_versions(state["versions"])
    if other and not options.ignore_versions:
        raise RecipeError(
            f"{where} was made with other versions: {'; '.join(other)}. Install those, or pass "
            "--ignore-versions to go on without being equal bit for bit"
        )


def _check_learners(
    state: Mapping[str, Any],
    where: str,
    options: RunOptions,
    learners: int,
    own: Collection[str],
) -> None:
    saved_by = state.get("learners", 1)
    if saved_by == learners or options.shards is not None:
        return
    found = f"{where} is of {saved_by} learners, and here are {learners}. Without --shards another"
    kept = [name for name in own if name != "collector"]
    if kept:
        raise RecipeError(
            f"{found} number can't go on with the {', '.join(kept)} of each: start as many"
        )
    if not options.ignore_versions:
        raise RecipeError(
            f"{found} number gives other bits: start as many, or pass --ignore-versions to go on "
            "without being equal bit for bit"
        )


def check_fits(policy: nn.Module, saved: Mapping[str, Any], where: Path | str) -> None:
    """Refuse values of another policy.

    Args:
        policy: that is to take them.
        saved: values by name.
        where: they lie, for messages.

    Raises:
        RecipeError: names a value that is missing, or of another shape.
    """
    for name, tensor in policy.state_dict().items():
        found = saved.get(name)
        if isinstance(tensor, Tensor) and (
            not isinstance(found, Tensor) or found.shape != tensor.shape
        ):
            there = "missing" if found is None else f"of shape {list(getattr(found, 'shape', []))}"
            raise RecipeError(
                f"{where} doesn't fit the policy here: {name} is {there} there and of shape "
                f"{list(tensor.shape)} here; the environment's spaces or the recipe have changed: "
                "use the versions that the run had"
            )


def versions() -> dict[str, str]:
    """Of the packages that results depend on, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def other_versions(saved: Mapping[str, str]) -> list[str]:
    """The packages that have other versions here, each with both."""
    now = versions()
    return [
        f"{name} was {saved[name]} and is {now.get(name)}"
        for name in _PACKAGES
        if name in saved and saved[name] != now.get(name)
    ]


def machine() -> dict[str, str]:
    """What floating-point results depend on beside versions: the CPU and torch's kernels for it."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        model = names[0] if names else model
    return {"cpu": model, "cpu_capability": torch.backends.cpu.get_cpu_capability()}


def starts_of(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """From which step on, with which versions and where a run went on, each time that it began.

    Of a run that was begun by an older version, the newest such start is all that is known.
    """
    known = {name: config.get(name, {}) for name in ("versions", "machine")}
    return list(config.get("starts") or [{"step": 0, **known}])


def with_this_start(earlier: Sequence[Mapping[str, Any]], step: int) -> list[Mapping[str, Any]]:
    """The starts of a run that goes on here after so many steps; later ones are made void."""
    own = {"step": step, "versions": versions(), "machine": machine()}
    return [*(start for start in earlier if start["step"] < step), own]


def why_other_bits(config: Mapping[str, Any], after: int, step: int | None = None) -> str:
    """What differs here from where a run took some of its steps, as far as config.json says.

    Args:
        config: what config.json holds.
        after, step: the steps are those after the first number, up to the second; None: all.
    """
    starts = starts_of(config)
    ends = [start["step"] for start in starts[1:]]
    other: dict[str, None] = {}  # each once, in order
    for start, end in zip(starts, [*ends, None], strict=True):
        is_before = step is None or start["step"] < step
        if is_before and (end is None or end > after):
            other |= dict.fromkeys(_differences(start))
    if other:
        return "; ".join(other)
    return (
        "the versions and the kind of CPU that its config.json names for these steps are the same "
        "here, so that something else has changed: the recipe, the environment's package, a "
        "driver, or the run's files"
    )


def _differences(start: Mapping[str, Any]) -> list[str]:
    """What differs here from one start of a run."""
    own, saved = machine(), start["machine"]
    return other_versions(start["versions"]) + [
        f"{name} was {saved[name]} and is {own[name]}"
        for name in own
        if name in saved and saved[name] != own[name]
    ]


def random_states() -> dict[str, Any]:
    """Of the generators that a loop may draw from."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.copy()), *rest],
        "python": random.getstate(),
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """The inverse of `random_states`."""
    torch.set_rng_state(states["torch"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
