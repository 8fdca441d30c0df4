"""The ranks of a start find each other, whatever an earlier one has left in the store."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from ranks import results, run_ranks

from torchrl_hts._world.launch import place
from torchrl_hts._world.meeting import meet
from torchrl_hts._world.world import World
from torchrl_hts.errors import WorldError


class Told:
    """A store that tells when a key has been read."""

    def __init__(self, store: Any, key: str, when_read: Callable[[], None]) -> None:
        self._store, self._key, self._when_read = store, key, when_read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(key)
        if key == self._key:
            self._when_read()
        return found


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_is_late_is_not_taken_for_that_of_the_start_before(late: int) -> None:
    store, size = dist.HashStore(), 3
    names: list[str] = []

    def come(rank: int, old_is_read: threading.Event) -> str:
        if rank != late:
            told = Told(store, f"torchrl_hts/sees/{late}", old_is_read.set)
            return meet(told, rank, size, 20)
        if names:
            old_is_read.wait(20)
        return meet(store, rank, size, 20)

    for _ in range(3):
        with ThreadPoolExecutor(size) as ranks:
            found = set(ranks.map(come, range(size), [threading.Event()] * size))
        assert len(found) == 1
        names += found
    assert len(set(names)) == 3


def test_fewer_may_come_than_before() -> None:
    store = dist.HashStore()
    names = set()
    for size in (4, 2, 1):
        with ThreadPoolExecutor(size) as ranks:
            found = set(ranks.map(lambda rank, size=size: meet(store, rank, size, 20), range(size)))
        assert len(found) == 1
        names |= found
    assert len(names) == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(WorldError, match=r"ranks 1, 2 did not come.*timeout_s=0.1.*rank 0 of 3"):
        meet(store, 0, 3, timeout_s=0.1)


def test_a_second_process_of_the_same_rank_is_told_so() -> None:
    """Two runs at one address: the word of the first is written over."""
    store = dist.HashStore()
    key = "torchrl_hts/is/0"
    told = Told(store, key, lambda: store.set(key, "another's word"))
    with pytest.raises(WorldError, match=r"another process calls itself rank 0 .*MASTER_PORT"):
        meet(told, 0, 2, timeout_s=20)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ("0", "rank 1 did not come to the start"),
        ("1", r"rank 1 of 2 \(by SLURM_PROCID\) can't reach"),
    ],
)
def test_a_rank_that_is_never_started(
    rank: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torchrun, whose agent would know; as in a shell within ``srun --pty``."""
    variables = {"STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost", "JOB_ID": str(os.getpid())}
    for name, value in (variables | {"PROCID": rank}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(WorldError, match=message):
        World(timeout_s=1)


def test_a_port_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        variables = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(WorldError, match=rf"port {port} of .* is taken.*another MASTER_PORT"):
            World(timeout_s=1)


def gathered() -> list[str]:
    with World(timeout_s=30) as world:
        return world.gather(f"rank {world.rank}")


def test_a_second_start_in_the_store_of_the_first() -> None:
    """As torchrun restarts its workers."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(2):
        for outcome in run_ranks(gathered, 2, store=store):
            assert outcome.error == ""
            assert outcome.result == ["rank 0", "rank 1"]


SLURM = {
    "SLURM_PROCID": "{}",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_JOB_ID": str(os.getpid() + 5000),  # another port than other tests'
}


def destroyed_in_between() -> list[list[str]]:
    found, kept = [], []
    for _ in range(2):
        with World(timeout_s=30) as world:
            found.append(world.gather(f"rank {world.rank}"))
        dist.destroy_process_group()
        kept.append(world)  # and so is the store that it has listened with
    return found


@pytest.mark.parametrize("variables", [None, SLURM], ids=["torchrun", "srun"])
def test_a_world_after_the_process_group_of_another_was_destroyed(variables: Any) -> None:
    both = [["rank 0", "rank 1"]] * 2
    assert results(run_ranks(destroyed_in_between, 2, variables=variables)) == [both, both]


def made_by_rank_0_alone() -> None:
    dist.init_process_group("gloo")  # the user's
    if dist.get_rank() == 0:
        World(timeout_s=1)


def test_a_rank_of_the_users_process_group_that_makes_no_world() -> None:
    first, _ = run_ranks(made_by_rank_0_alone, 2)
    assert re.match(
        r"WorldError: rank 0 of 2 can't reach .*: every rank must make one", first.error
    )


def test_an_interface_that_is_none_is_named_with_those_that_are() -> None:
    variables = SLURM | {"GLOO_SOCKET_IFNAME": "nope"}
    outcomes = run_ranks(gathered, 2, variables=variables)
    # The store goes with rank 0, where the other one may come later.
    assert re.match(
        r"WorldError: .*GLOO_SOCKET_IFNAME is 'nope'.* interfaces, lo", outcomes[0].error
    )
    assert outcomes[1].error.startswith("WorldError: ")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "lacks MASTER_ADDR"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a number, got 'one'"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "lacks SLURM_STEP_NODELIST"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE must be at least 1, got 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be from 0 to 1, got 2"),
        (SLURM | {"SLURM_PROCID": "2"}, "SLURM_PROCID must be from 0 to 1, got 2"),
        (SLURM | {"MASTER_PORT": "99999"}, "MASTER_PORT must be from 1 to 65535, got 99999"),
    ],
)
def test_damaged_variables_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(variables)
