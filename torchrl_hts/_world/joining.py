"""Joining the other ranks of a run: those of a process group that is there, or of a launcher."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from torchrl_hts._world.launch import Place
from torchrl_hts._world.meeting import meet

__all__ = ["join"]


def join(own: Place | None, timeout_s: float) -> tuple[int, int, int | None]:
    """Have a process group of all ranks, and find out who this is.

    Args:
        own: the place that a launcher has given this process.
        timeout_s: how long to wait for the others.

    Returns:
        rank and size, and how many ranks are on this machine, if that is known.
    """
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        return rank, size, own.local_size if own is not None and own.size == size else None
    if own is None or own.size == 1:
        return 0, 1, 1
    at_torchrun = "RANK" in os.environ  # whose own store outlives rank 0
    where = "env://" if at_torchrun else f"tcp://{own.address}:{own.port}"
    patience = timedelta(seconds=timeout_s)
    store, *_ = next(rendezvous(where, own.rank, own.size, timeout=patience))
    dist.init_process_group(
        "gloo",
        store=PrefixStore(meet(store, own.rank, own.size, timeout_s), store),
        rank=own.rank,
        world_size=own.size,
        timeout=patience,
    )
    return own.rank, own.size, own.local_size
