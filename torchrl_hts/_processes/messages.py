"""What the main process, worker servers and workers say to each other, and how.

Objects go through control connections; requests to a server are JSON over a socket, along with
file descriptors. Knows no worker: everything here is a function of a connection or a descriptor.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import select
import socket
import struct
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

__all__ = [
    "pickled",
    "read_fds",
    "read_message",
    "readable",
    "receive_object",
    "send_message",
    "send_object",
    "unpickled",
]

_HEADER = struct.Struct("!II")  # bytes of JSON that follow, file descriptors that come along
_MAX_FDS_PER_MESSAGE = 128


def pickled(value: object, pickler: type[cloudpickle.Pickler] = cloudpickle.Pickler) -> bytes:
    """A value as bytes, with what the main script defines by value: workers never import it."""
    main = sys.modules["__main__"]
    if main.__name__ != "__main__":  # in a process that multiprocessing has spawned
        cloudpickle.register_pickle_by_value(main)
    stream = io.BytesIO()
    pickler(stream).dump(value)
    return stream.getvalue()


def unpickled(data: bytes) -> Any:
    """What `pickled` has made of a value.

    Without the warnings of modules that this imports: the main process has imported the same ones,
    with filters that may have been others then. An error of those of now would end a worker.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pickle.loads(data)


def send_object(control: Connection, message: object) -> None:
    """Send an object through a control connection."""
    control.send_bytes(pickled(message))


def receive_object(control: Connection) -> Any:
    """Receive what `send_object` has sent; None, or the other side's end, raises EOFError.

    An end may come within a message. What a signal handler raises goes through, TimeoutError too.
    """
    try:
        message = unpickled(control.recv_bytes())
    except OSError as error:
        if type(error) is OSError and error.errno is None:  # multiprocessing's own
            raise EOFError from error
        raise
    if message is None:
        raise EOFError
    return message


def send_message(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message, with file descriptors that the other side takes with `read_fds`.

    Raises:
        OSError: if the other side has ended, or a descriptor is closed.
    """
    body = json.dumps(message).encode()
    sock.sendall(_HEADER.pack(len(body), len(fds)) + body)
    for start in range(0, len(fds), _MAX_FDS_PER_MESSAGE):
        socket.send_fds(sock, [b"f"], fds[start : start + _MAX_FDS_PER_MESSAGE])


def read_message(sock: socket.socket) -> dict[str, Any] | None:
    """The next message, with the number of its descriptors as ``"fds"``; None at the end."""
    header = _read_exactly(sock, _HEADER.size)
    if header is None:
        return None
    size, num_fds = _HEADER.unpack(header)
    body = _read_exactly(sock, size)
    if body is None:
        return None
    message: dict[str, Any] = json.loads(body)
    message["fds"] = num_fds
    return message


def _read_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        try:
            part = sock.recv(size - len(data))
        except ConnectionResetError:
            return None
        if not part:
            return None
        data += part
    return data


def read_fds(sock: socket.socket, count: int) -> list[int]:
    """The descriptors that came with a message, in the order in which they were given.

    Raises:
        BrokenPipeError: if the other side has ended.
        OSError: if this process may not open as many; the message is read all the same.
    """
    fds: list[int] = []
    missing = 0
    for start in range(0, count, _MAX_FDS_PER_MESSAGE):
        expected = min(_MAX_FDS_PER_MESSAGE, count - start)
        data, received, _, _ = socket.recv_fds(sock, 1, expected)
        if not data:
            raise BrokenPipeError("the main process ended while it handed file descriptors over")
        fds.extend(received)
        missing += expected - len(received)  # the kernel drops those that don't fit
    if missing:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, f"{missing} of {count} file descriptors could not be opened")
    return fds


def readable(fd: int, timeout_s: float) -> bool:
    """Whether there is something to read; unlike ``select``, for any number of descriptors."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
