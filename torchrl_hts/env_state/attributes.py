"""The attributes of an object, those in ``__slots__`` included, and its class."""

from __future__ import annotations

import contextlib
import types
from typing import Any, TypeGuard, TypeVar

__all__ = ["attributes_of", "is_a", "num_slots", "set_attribute"]

T = TypeVar("T")


def attributes_of(value: object) -> dict[str, Any]:
    """All that are set, by name."""
    found: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for name, member in _slots(type(value)).items():
        with contextlib.suppress(AttributeError):  # nothing has been put there
            found[name] = member.__get__(value)
    return found


def set_attribute(value: object, name: str, content: object) -> None:
    """Set one, past what its class does when somebody sets it."""
    member = _slots(type(value)).get(name)
    if member is None:
        vars(value)[name] = content
    else:
        member.__set__(value, content)


def is_a(value: object, cls: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Whether an object is of a class, or of one of several, by itself.

    A proxy is not, which passes for what it stands for. To ask one whose object is gone for its
    ``__class__``, as `isinstance` does, raises an error.
    """
    return issubclass(type(value), cls)


def num_slots(cls: type) -> int:
    """For how many attributes objects of a class have a slot."""
    return len(_slots(cls))


def _slots(cls: type) -> dict[str, types.MemberDescriptorType]:
    return {
        name: member
        for each in reversed(cls.__mro__)
        if "__slots__" in vars(each)
        for name, member in vars(each).items()
        if isinstance(member, types.MemberDescriptorType)
    }
