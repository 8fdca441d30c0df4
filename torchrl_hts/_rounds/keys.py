"""Nested keys of TensorDicts: as tuples of names, and as people write them. Knows no torch."""

from __future__ import annotations

__all__ = ["Key", "as_path", "as_written", "named"]

Key = tuple[str, ...]


def as_path(key: str | Key) -> Key:
    """A key as a tuple, of one name too.

    Example:
        >>> as_path("reward"), as_path(("next", "reward"))
        (('reward',), ('next', 'reward'))
    """
    return key if isinstance(key, tuple) else (key,)


def as_written(key: Key) -> str | Key:
    """A key as people, and policies, write it: a name, or a tuple of several.

    Example:
        >>> as_written(("reward",)), as_written(("next", "reward"))
        ('reward', ('next', 'reward'))
    """
    return key[0] if len(key) == 1 else key


def named(key: Key) -> str:
    """The same in a message.

    Example:
        >>> print(named(("reward",)), named(("next", "reward")))
        'reward' ('next', 'reward')
    """
    return repr(as_written(key))
