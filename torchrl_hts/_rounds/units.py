"""Environments by their numbers, as people read them: one, or those of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["listed", "named", "numbers"]

_LISTED = 16  # numbers that are written out


def numbers(envs: Iterable[int], first_env: int) -> tuple[int, ...]:
    """The numbers, among the environments of all learners, of some of this learner's.

    Args:
        envs: indices among this learner's.
        first_env: the number of its environment 0.

    Example:
        >>> numbers([0, 2], 8)
        (8, 10)
    """
    return tuple(first_env + env for env in envs)


def named(envs: Sequence[int]) -> str:
    """Neighbours, as the subject of a sentence.

    Example:
        >>> named([3]), named(range(8, 16))
        ('environment 3', 'environments 8 to 15')
    """
    if len(envs) == 1:
        return f"environment {envs[0]}"
    return f"environments {envs[0]} to {envs[-1]}"


def listed(envs: Sequence[int]) -> str:
    """Their numbers; of very many, runs of neighbours by their ends.

    Example:
        >>> listed([0, 1, 2]), listed([*range(32), 40])
        ('0, 1, 2', '0-31, 40')
    """
    if len(envs) <= _LISTED:
        return ", ".join(map(str, envs))
    runs: list[list[int]] = []
    for env in envs:
        if runs and env == runs[-1][-1] + 1:
            runs[-1][1:] = [env]
        else:
            runs.append([env])
    return ", ".join("-".join(map(str, run)) for run in runs)
