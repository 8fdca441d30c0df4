"""Standard output and standard error, which may be lost: no run depends on who reads them.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

__all__ = ["Output"]


class Output:
    """A stream that is written to for people, and that raises nothing once it is lost.

    As a pipe is whose reader has ended (Ctrl-C ends ``tee`` too), or a terminal that was closed.
    What anybody writes to it then goes nowhere. So does what it had kept back, which would make the
    process end with Python's exit code for that, 120.

    Args:
        stream: with a descriptor of its own, if writing to it can fail.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, if it can be."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Write what was kept back, if it can be."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        if self._stream is not sys.stderr:
            said = f"standard output is lost ({error.strerror}): no more is shown"
            print(said, file=Output(sys.stderr), flush=True)

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's."""
        return getattr(self._stream, name)
