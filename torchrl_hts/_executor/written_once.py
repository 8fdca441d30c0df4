"""That no name in a batch is written by two: by the environment, the collector or the policy.

Who writes last would replace, without a word, what the other said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchrl_hts._rounds.keys import Key, named

__all__ = ["check_written_once", "collector_keys", "collector_names"]

_ALWAYS = "which every batch has"
_BESIDES: dict[Key, str] = {("policy_version",): _ALWAYS, ("collector",): _ALWAYS}


def collector_keys(*, max_frames_per_traj: int, write_is_init: bool) -> dict[Key, str]:
    """What the collector writes beside a gymnasium environment's observations, and why."""
    keys: dict[Key, str] = {}
    for name in ("done", "terminated", "truncated"):
        keys[(name,)] = keys["next", name] = _ALWAYS
    keys["next", "reward"] = keys["next", "next"] = _ALWAYS
    if max_frames_per_traj:
        keys[("step_count",)] = keys["next", "step_count"] = "because an episode has a limit"
    if write_is_init:
        keys[("is_init",)] = keys["next", "is_init"] = "because the policy reads it"
    return keys


def collector_names() -> set[str]:
    """The first names of all that the collector may write, in this batch or another."""
    keys = {**collector_keys(max_frames_per_traj=1, write_is_init=True), **_BESIDES}
    return {name for name, *_ in keys}


def check_written_once(
    observed: Iterable[Key],
    collector: Mapping[Key, str],
    outputs: Iterable[Key],
    *,
    remedy: str,
) -> None:
    """Raise if two write the same entry, or one of them into what is another's.

    Args:
        observed: what the environment writes, ``("next", ...)`` included, but for what it hands on
            as the policy leaves it.
        collector: what the collector writes besides, and why.
        outputs: what the policy writes.
        remedy: how an entry of the environment is renamed.

    Raises:
        ValueError: it names the entry, who writes it, and what to do.
    """
    theirs = {**collector, **_BESIDES}
    observed, outputs = list(observed), list(outputs)
    for key in observed:
        for other, why in theirs.items():
            if _collide(key, other):
                raise ValueError(
                    f"the environment gives {named(key)}, and the collector writes "
                    f"{named(other)}, {why}: one would replace the other. {remedy}"
                )
    for key in outputs:
        for other, why in theirs.items():
            if _collide(key, other):
                raise ValueError(
                    f"the policy writes {named(key)}, and the collector writes {named(other)}, "
                    f"{why}: one would replace the other. Rename the policy's (out_keys)"
                )
        for other in observed:
            if _collide(key, other):
                raise ValueError(
                    f"the environment gives {named(other)}, and the policy writes {named(key)}: "
                    f"one would replace the other. {remedy}, or the policy's output (out_keys)"
                )


def _collide(key: Key, other: Key) -> bool:
    """Whether two keys are the same entry, or one lies within the other."""
    length = min(len(key), len(other))
    return key[:length] == other[:length]
