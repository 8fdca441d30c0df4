"""Importing this module raises ImportError where TorchRL or tensordict is too old or too new.

pip keeps to the ranges of pyproject.toml; other ways to install don't, and what another release
lacks would show as an error deep inside. Whatever imports torchrl imports this first. The metadata
alone are read, so nothing large is imported. torch is not looked at: TorchRL leaves it free, and a
release newer than those in pyproject.toml may well run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

__all__ = ["RANGES", "check"]

# From the first release on, to before the second: the same ranges as in pyproject.toml.
RANGES: Mapping[str, tuple[str, str]] = {
    "torchrl": ("0.14", "0.15"),
    "tensordict": ("0.14", "0.15"),
}


def check(name: str, found: str | None) -> None:
    """Raise ImportError, in one sentence, unless a package's version is in its range.

    Args:
        name: of the package, one of `RANGES`.
        found: its version; None if it isn't installed.

    Example:
        >>> check("torchrl", "0.14.1")
        >>> check("torchrl", "0.13.2")
        Traceback (most recent call last):
        ImportError: torchrl_hts needs torchrl>=0.14,<0.15 and found 0.13.2, which is too old: \
pip install 'torchrl>=0.14,<0.15'
    """
    first, end = RANGES[name]
    wanted = f"{name}>={first},<{end}"
    if found is None:
        why = ", which is not installed"
    elif _numbers(found) < _numbers(first):
        why = f" and found {found}, which is too old"
    elif _numbers(found) >= _numbers(end):
        why = f" and found {found}, which is too new"
    else:
        return
    raise ImportError(f"torchrl_hts needs {wanted}{why}: pip install '{wanted}'", name=name)


def _numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version: pre-releases and builds count as their release."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        # Nightly builds and source trees go by other names, or none, and are taken on trust.
        return None if find_spec(name) is None else RANGES[name][0]


for _name in RANGES:
    check(_name, _installed(_name))
