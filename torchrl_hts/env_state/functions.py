"""What is known of a function: what it does, what it holds, and where it is from."""

from __future__ import annotations

import hashlib
import sys
import types
from typing import Any

from torchrl_hts.env_state.attributes import is_a

__all__ = ["code_digest", "contents", "function_state", "globals_of", "importable", "restore"]


def importable(value: Any) -> bool:
    """Whether a function or a class is found by its name."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def globals_of(cls: type) -> dict[str, Any]:
    """What the functions of a class see as globals, also where it was sent here by value."""
    found: dict[str, Any] = {}
    for value in vars(cls).values():
        if is_a(value, types.FunctionType):
            found |= value.__globals__
    return found


def code_digest(function: types.FunctionType) -> str:
    """Says what a function does, constants and the functions in it included."""
    return hashlib.sha256(_code_text(function.__code__).encode()).hexdigest()[:16]


def _code_text(code: types.CodeType) -> str:
    constants = [
        _code_text(each)
        if isinstance(each, types.CodeType)
        else repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each)
        for each in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_freevars, constants))


def contents(function: types.FunctionType) -> list[tuple[object, ...]]:
    """What each cell of the closure holds: one object, or none."""
    found: list[tuple[object, ...]] = []
    for cell in function.__closure__ or ():
        try:
            found.append((cell.cell_contents,))
        except ValueError:
            found.append(())
    return found


def function_state(function: types.FunctionType) -> tuple[Any, ...]:
    """All of a function that may change."""
    return contents(function), function.__defaults__, function.__kwdefaults__, vars(function)


def restore(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    """Put a function into a state."""
    held, function.__defaults__, function.__kwdefaults__, attributes = state
    vars(function).clear()
    vars(function).update(attributes)
    for cell, content in zip(function.__closure__ or (), held, strict=True):
        if content:
            (cell.cell_contents,) = content
        else:
            del cell.cell_contents
