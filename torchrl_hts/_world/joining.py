"""Joining the other ranks of a run: those of a process group that is there, or of a launcher."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from torchrl_hts._world.launch import Place
from torchrl_hts._world.meeting import meet
from torchrl_hts.errors import HTSError, WorldError

__all__ = ["join", "over_the_network", "what_failed"]

_own_stores: dict[tuple[str, int], Any] = {}  # a port can't be listened at twice


def join(own: Place | None, timeout_s: float) -> tuple[int, int, int | None]:
    """Have a process group of all ranks, and find out who this is.

    Args:
        own: the place that a launcher has given this process.
        timeout_s: how long to wait for the others.

    Raises:
        WorldError: if they can't be reached, or don't come.

    Returns:
        rank and size, and how many ranks are on this machine, if that is known.
    """
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        return rank, size, own.local_size if own is not None and own.size == size else None
    if own is None or own.size == 1:
        return 0, 1, 1
    patience = timedelta(seconds=timeout_s)
    try:
        store = _store(own, patience)
        with over_the_network():
            dist.init_process_group(
                "gloo",
                store=PrefixStore(meet(store, own.rank, own.size, timeout_s), store),
                rank=own.rank,
                world_size=own.size,
                timeout=patience,
            )
    except dist.DistError as error:
        by = "RANK and WORLD_SIZE" if "RANK" in os.environ else "SLURM_PROCID"
        who = f"rank {own.rank} of {own.size} (by {by})"
        if "EADDRINUSE" in str(error):
            raise WorldError(
                f"{who} can't listen on port {own.port} of {own.address}, which is taken, by "
                "another run or by a second rank 0: give all ranks another MASTER_PORT"
            ) from error
        raise WorldError(
            f"{who} can't reach the others by way of rank 0 at {own.address}:{own.port} within "
            f"timeout_s={timeout_s:g}: start every rank, give all the address of rank 0's machine, "
            "and let the firewall pass that port; or take the variables away, for one learner "
            f"({what_failed(error)})"
        ) from error
    if own.rank == 0:
        _own_stores[own.address, own.port] = store
    return own.rank, own.size, own.local_size


def _store(own: Place, patience: timedelta) -> Any:
    """Where ranks leave word for each other: torchrun's, which outlives rank 0, or rank 0's."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, *_ = next(rendezvous("env://", own.rank, own.size, timeout=patience))
        return store
    # Rank 0's outlives a process group: another one, of another world, may come.
    store = _own_stores.get((own.address, own.port)) if own.rank == 0 else None
    if store is None:
        # It doesn't wait until all are there: `meet` does, and names who is missing.
        store = TCPStore(
            own.address, own.port, own.size, own.rank == 0, patience, wait_for_workers=False
        )
    store.set_timeout(patience)
    return store


def what_failed(error: Exception) -> str:
    """What the network's library has met with, without places in its source and its own advice."""
    line, *_ = [*str(error).splitlines(), ""]
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". This is typically")[0]


@contextmanager
def over_the_network() -> Iterator[None]:
    """Inside, gloo connects ranks; where it finds no address for this machine, say what helps.

    Raises:
        WorldError: names the variable, and what it may be.
    """
    try:
        yield
    except (dist.DistError, HTSError):  # of ranks that can't be reached
        raise
    except RuntimeError as error:
        name, found = os.environ.get("GLOO_SOCKET_IFNAME"), "as `ip link` lists them"
        with suppress(OSError):
            found = ", ".join(interface for _, interface in socket.if_nameindex())
        fault = "is not set" if name is None else f"is {name!r}"
        raise WorldError(
            f"gloo can't connect this machine, and the variable GLOO_SOCKET_IFNAME {fault}: set it "
            f"to one of the machine's network interfaces, {found} ({what_failed(error)})"
        ) from error
