"""What the learners of one machine share: its cores, and how many threads torch has on them."""

from __future__ import annotations

import os
from math import ceil
from typing import Any

import pytest
import torch
from processes import needs_linux
from ranks import results, run_ranks

from torchrl_hts._processes.limits import available_cores
from torchrl_hts._world import sharing
from torchrl_hts._world.world import World

CORES = 8.0


def share(local_size: int, **arguments: Any) -> tuple[float, int]:
    """A rank's cores and threads, on a machine of eight cores, as torchrun starts it."""
    sharing.available_cores = lambda: CORES
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
    os.environ["OMP_NUM_THREADS"] = "1"  # which torchrun sets, and torch takes when it is loaded
    torch.set_num_threads(1)
    with World(timeout_s=60, **arguments) as world:
        return world.cores, torch.get_num_threads()


def share_in_each_way(local_size: int) -> list[tuple[float, int]]:
    return [share(local_size), share(local_size, shards=2), share(local_size, shards=2, threads=3)]


# Two on one machine, and one on each of two.
@pytest.mark.parametrize(("local_size", "cores"), [(2, 4), (1, 8)])
def test_cores_are_shared_out_and_threads_follow(local_size: int, cores: int) -> None:
    for found in results(run_ranks(share_in_each_way, 2, local_size)):
        assert found == [(cores, cores), (cores, 1), (cores, 3)]


def share_few() -> tuple[float, int]:
    sharing.available_cores = lambda: 1.5
    torch.set_num_threads(2)
    with World(timeout_s=60) as world:
        return world.cores, torch.get_num_threads()


def test_a_part_of_a_core_is_enough_for_a_thread() -> None:
    assert results(run_ranks(share_few, 2)) == [(0.75, 1)] * 2


def bound_to_a_core() -> tuple[int, float]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[int(os.environ["SLURM_PROCID"])]])
    with World(timeout_s=60) as world:
        return world.local_size, world.cores


OF_SLURM = {
    "SLURM_PROCID": "{}",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_JOB_ID": str(os.getpid()),
}


@needs_linux
@pytest.mark.skipif(ceil(available_cores()) < 2, reason="two learners need two cores")
def test_cores_that_ranks_are_bound_to_are_not_shared_out_again() -> None:
    assert results(run_ranks(bound_to_a_core, 2, variables=OF_SLURM)) == [(2, 1.0)] * 2
