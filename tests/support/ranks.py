"""Processes that are the ranks of one run, on this machine, started as torchrun starts them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_CONTEXT: Any = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torchrl_hts.collector"])


class Outcome(NamedTuple):
    """What has become of a rank.

    Attributes:
        result: what it returned; None if it did not.
        error: type and message of what it raised, or how it was ended; "" if it returned.
        took_s: seconds that it ran.
    """

    result: Any
    error: str
    took_s: float


def results(outcomes: list[Outcome]) -> list[Any]:
    """What all ranks have returned; none may have failed."""
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    return [outcome.result for outcome in outcomes]


def run_ranks(
    target: Callable[..., Any],
    size: int,
    *args: Any,
    variables: Mapping[str, str] | None = None,
    silent: int | None = None,
    store: dist.TCPStore | None = None,
    timeout_s: float = 120.0,
) -> list[Outcome]:
    """Call a function of a module in each rank.

    Args:
        args: of the function.
        variables: of the environment, in place of those of torchrun; the rank stands for ``{}``.
        silent: a rank that need not end; it is killed after the others.
        store: that of an earlier call, as torchrun's agent keeps it when it starts its ranks anew.
    """
    # That of torchrun's agent, which outlives every rank.
    store = store or dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if variables is None:
        variables = {
            "RANK": "{}",
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    ranks = []
    for rank in range(size):
        own = {name: value.replace("{}", str(rank)) for name, value in variables.items()}
        here, there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_run, args=(there, own, [*sys.path], target, args))
        process.start()
        there.close()
        ranks.append((process, here))
    deadline = time.monotonic() + timeout_s
    outcomes: list[Outcome | None] = [None] * size
    while time.monotonic() < deadline:
        waiting = [rank for rank in range(size) if outcomes[rank] is None and rank != silent]
        if not waiting:
            break
        for rank in waiting:
            process, pipe = ranks[rank]
            if pipe.poll(0.05):
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    process.join()
                    outcomes[rank] = Outcome(None, f"ended with {process.exitcode}", 0.0)
    for process, _ in ranks:
        process.join(0 if None in outcomes else 10)
        process.kill()
        process.join()
    return [outcome or Outcome(None, "silent", timeout_s) for outcome in outcomes]


def _run(
    pipe: Connection,
    variables: dict[str, str],
    path: list[str],
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    sys.path[:] = path
    os.environ.update(variables)
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        result, error = target(*args), ""
    except Exception as raised:
        result, error = None, f"{type(raised).__name__}: {raised}"
    pipe.send(Outcome(result, error, time.monotonic() - began))
