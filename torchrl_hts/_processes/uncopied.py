"""What can't be copied or pickled, since a part of it is this process's alone."""

from __future__ import annotations

from typing import ClassVar, NoReturn

__all__ = ["Uncopied"]


class Uncopied:
    """Refuses to be copied or pickled, by a sentence that says what to do.

    Sockets and connections do let themselves be copied. The copy has the same descriptor, which it
    closes when it is dropped, however far the copy of the whole had come.
    """

    _why_uncopied: ClassVar[str] = (
        "its workers belong to this process; make another, and give it state_dict()"
    )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__} can't be copied or pickled: {self._why_uncopied}")
