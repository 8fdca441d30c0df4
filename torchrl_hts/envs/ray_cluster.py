"""How this process comes into a Ray cluster, and what is said where it doesn't."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["connected_ray", "imported_ray", "reaching_ray"]

_KNOCK_S = 10.0


def connected_ray(address: str) -> Any:
    """Ray, once this process is connected to a cluster.

    Args:
        address: of the cluster, if this process isn't connected; see `make_remote`.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConnectionError: see `reaching_ray`.
    """
    ray = imported_ray()
    if not ray.is_initialized():
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS", address)
        with reaching_ray(address), _same_signal_handlers():
            # A worker's server may have imported Ray when its variables were others, of the token
            # too.
            ray._raylet.Config.initialize("")
            ray.init(address=address, logging_level=logging.WARNING)
    return ray


@contextlib.contextmanager
def reaching_ray(address: str) -> Iterator[None]:
    """Connect to a Ray cluster inside: what stands against it is told in one sentence.

    Args:
        address: of the cluster, as `ray.init` takes it.

    Raises:
        ConnectionError: nobody listens there, which is found out at once, where Ray would try
            again for minutes. Or what listens doesn't let this process in.

    Example:
        >>> with reaching_ray("127.0.0.1:1"):  # doctest: +ELLIPSIS
        ...     print("never gets here")
        Traceback (most recent call last):
        ConnectionError: there is no Ray cluster at address='127.0.0.1:1' ...: start one with ...
    """
    listens = _knock(address)
    try:
        yield
    except ConnectionError as error:
        raise (_kept_out if listens else _no_cluster)(address, error) from error


def _knock(address: str) -> bool:
    """Whether somebody listens at an address; False where it doesn't say which machine and port.

    Raises:
        ConnectionError: if nobody does.
    """
    found = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address)
    if found is None:
        return False
    try:
        socket.create_connection((found[1], int(found[2])), _KNOCK_S).close()
    except OSError as error:
        raise _no_cluster(address, error) from error
    return True


def _no_cluster(address: str, error: OSError) -> ConnectionError:
    return ConnectionError(
        f"there is no Ray cluster at address={address!r} ({error}): start one with 'ray start "
        "--head', and give its address on machines that are not a part of it"
    )


def _kept_out(address: str, error: OSError) -> ConnectionError:
    return ConnectionError(
        f"something listens at address={address!r}, but it doesn't let this process into a Ray "
        f"cluster ({error}; Ray may have printed more). If the cluster asks for a token, set "
        "RAY_AUTH_MODE=token here, and have the same token as its machines "
        "(docs/how_to/remote_simulators.md). If one of its nodes is down, start it again"
    )


@contextlib.contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """Ray sets one for SIGTERM, which a run that saves itself needs."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def imported_ray() -> Any:
    """Ray.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"remote environments need the package that provides {error.name!r}, which is not "
            "installed: pip install 'torchrl_hts[ray]'",
            name=error.name,
        ) from error
    return ray
