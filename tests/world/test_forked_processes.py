"""Processes that a rank forks are no ranks."""

from __future__ import annotations

import os

from ranks import results, run_ranks

from torchrl_hts import World, WorldError


def fork() -> tuple[str, list[int]]:
    """What a forked process is told by the world, and what the ranks say after it has ended."""
    with World(timeout_s=30) as world:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                with world:
                    world.any(False)
            except WorldError as error:
                os.write(writing, str(error).encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with open(reading) as told:
            return told.read(), world.gather(world.rank)


def test_a_forked_process_is_told_that_it_is_no_rank_and_leaves_the_world_as_it_is() -> None:
    for rank, (told, ranks) in enumerate(results(run_ranks(fork, 2))):
        assert told.startswith(f"this process was forked from rank {rank}, and has no connections")
        assert ranks == [0, 1]
