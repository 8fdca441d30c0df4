"""What a loss is computed in, as far as an interrupt there is concerned."""

from __future__ import annotations

__all__ = ["ToModule"]


class ToModule:
    """Raises on its way out, as tensordict's context of a module's parameters does."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None:
        raise RuntimeError("Converting a tensordict to boolean value is not permitted")
