"""What a worker writes to stderr: passed on as it comes, and its end kept for error messages.

A worker's stderr is a pipe to its server, which reads it in its own loop. So the last words of a
native engine that crashes reach the message that tells of it, and a user sees what workers write
just as without the pipe.
"""

from __future__ import annotations

import contextlib
import os
import select

__all__ = ["WorkerOutput", "be_silent"]

_KEPT_BYTES = 1 << 15
_KEPT_LINES = 40
_LINES_BEFORE_CRASH = 10
_CRASH = "Fatal Python error"  # how faulthandler begins, which writes the newest call first
_LINE_LENGTH = 300
_PIPE_BYTES = 1 << 16
_CHUNK = 1 << 12  # a write of so much to a pipe that polls as writable does not block
_PATIENCE_MS = 1000


class WorkerOutput:
    """The server's side of one worker's stderr.

    Attributes:
        fd: the end to read from; -1 after `close`.
        write_fd: the worker's end, which the server closes after the fork.
    """

    def __init__(self) -> None:
        self.fd, self.write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._kept = b""

    def pump(self) -> bool:
        """Take in and pass on what has come, without waiting; False once every writer is gone."""
        for _ in range(_PIPE_BYTES // _CHUNK + 1):  # no more: others want to be served too
            if self.fd < 0:
                return False
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._kept = (self._kept + chunk)[-_KEPT_BYTES:]
            _pass_on(chunk)
        return True

    def tail(self) -> str:
        """The last lines; of a crash that Python tells of, its begin and what came before it."""
        lines = self._kept.decode(errors="replace").splitlines()
        crash = next((n for n, line in enumerate(lines) if line.startswith(_CRASH)), None)
        if crash is None:
            kept = lines[-_KEPT_LINES:]
        else:
            begin = max(0, crash - _LINES_BEFORE_CRASH)
            kept = lines[begin : begin + _KEPT_LINES]
        return "\n".join(line[:_LINE_LENGTH] for line in kept)

    def close(self) -> None:
        """Close the end to read from; what was kept stays."""
        os.close(self.fd)
        self.fd = -1


def _pass_on(chunk: bytes) -> None:
    """Write to this process's stderr; a reader that takes nothing for a second misses it.

    The server must not be held up for longer: it has to notice the end of the main process.
    """
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    while chunk and any(event & select.POLLOUT for _, event in poll.poll(_PATIENCE_MS)):
        with contextlib.suppress(OSError):
            chunk = chunk[os.write(2, chunk) :]
            continue
        return


def be_silent() -> None:
    """Send to nowhere all that this process writes to stdout and stderr from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
