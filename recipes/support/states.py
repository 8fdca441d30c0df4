"""What a checkpoint says of a run beside its parts, and whether another run can go on from it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import random
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from support.errors import RecipeError
from support.options import RunOptions, differences

__all__ = [
    "FORMAT",
    "Stateful",
    "check_state",
    "machine",
    "other_versions",
    "random_states",
    "set_random_states",
    "versions",
    "why_other_bits",
]

FORMAT = 2  # of checkpoints
_PACKAGES = (
    *("torchrl_hts", "torch", "torchrl", "tensordict", "gymnasium", "numpy"),
    *("ale-py", "opencv-python", "opencv-python-headless", "envpool", "gfootball"),
)


class Stateful(Protocol):
    """What a checkpoint can hold."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def check_state(
    state: Mapping[str, Any],
    where: str,
    *,
    recipe: str,
    options: RunOptions,
    parts: Collection[str],
    learners: int,
) -> None:
    """Refuse a checkpoint that a run could not go on from.

    Args:
        state: of the checkpoint.
        where: it lies, for messages.
        recipe, options, parts, learners: of this run.

    Raises:
        RecipeError: the message says what doesn't fit.
    """
    if state.get("format") != FORMAT or state.get("recipe") != recipe:
        raise RecipeError(
            f"{where} is of recipe {state.get('recipe')!r}, format {state.get('format')}; this "
            f"is {recipe!r}, format {FORMAT}: resume with what made it"
        )
    changed = differences(state["options"], options)
    if changed:
        raise RecipeError(f"{where} is of another configuration: {'; '.join(changed)}")
    if state["parts"].keys() != set(parts):
        raise RecipeError(
            f"{where} holds {', '.join(state['parts'])}; this run has {', '.join(parts)}"
        )
    saved_by = state.get("learners", 1)
    if saved_by != learners and options.shards is None and not options.ignore_versions:
        raise RecipeError(
            f"{where} is of {saved_by} learners, and here are {learners}. Without --shards another "
            "number gives other bits: start as many, or pass --ignore-versions to go on without "
            "being equal bit for bit"
        )
    other = other_versions(state["versions"])
    if other and not options.ignore_versions:
        raise RecipeError(
            f"{where} was made with other versions: {'; '.join(other)}. Install those, or pass "
            "--ignore-versions to go on without being equal bit for bit"
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


def why_other_bits(config: Mapping[str, Any]) -> str:
    """What differs here from where a run's config.json was written, as far as it says."""
    own, saved = machine(), config.get("machine", {})
    other = other_versions(config.get("versions", {}))
    other += [
        f"{name} was {saved[name]} and is {own[name]}"
        for name in own
        if name in saved and saved[name] != own[name]
    ]
    if other:
        return "; ".join(other)
    return (
        "the versions and the kind of CPU that its config.json names are the same here, so that "
        "something else has changed: the recipe, the environment's package, or a driver"
    )


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
