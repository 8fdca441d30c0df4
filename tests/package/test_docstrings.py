"""The docstrings of public names tell of every argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import import_module
from typing import Any

import pytest

MODULES = ("", ".env_state", ".envs", ".testing", ".theory")
# What these take is gymnasium's, or Python's, to explain.
OVERRIDES = {"reset", "step", "begin_reset", "begin_step", "tell_when_over"}


def functions() -> Iterator[Any]:
    """Everything with arguments that has a public name, and its public methods."""
    for suffix in MODULES:
        module = import_module(f"torchrl_hts{suffix}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) and not issubclass(value, Exception | Enum):
                yield pytest.param(value, id=name)
                for method, member in vars(value).items():
                    if inspect.isfunction(member) and method not in OVERRIDES and method[0] != "_":
                        yield pytest.param(member, id=f"{name}.{method}")
            elif inspect.isfunction(value):
                yield pytest.param(value, id=name)


@pytest.mark.parametrize("function", [*functions()])
def test_every_argument_is_told_of(function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    arguments = [name for name in inspect.signature(function).parameters if name != "self"]
    told = [name for name in arguments if re.search(rf"^ {{4}}{name}: \S", text, re.MULTILINE)]
    assert told == arguments
