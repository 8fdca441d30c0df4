"""Random frames of several learners are those of one."""

from __future__ import annotations

from typing import Any

from environments import EchoEnv
from policies import categorical
from ranks import results, run_ranks

from torchrl_hts import HTSCollector, World, keep_servers

NUM_ENVS, ALPHA = 4, 3


def actions(frames: int) -> Any:
    """Of all ranks' environments, in three rounds, and whether the policy took them."""
    with (
        keep_servers(),
        World(timeout_s=60) as world,
        HTSCollector(
            [EchoEnv] * NUM_ENVS,
            categorical(),
            frames_per_batch=NUM_ENVS * ALPHA,
            total_frames=NUM_ENVS * ALPHA * 3,
            seed=5,
            num_executors=1,
            init_random_frames=frames,
            world=world,
        ) as collector,
    ):
        found = []
        for batch in collector:
            asked = bool(batch["logits"].any())
            rows = [row for rows in world.gather(batch["action"].tolist()) for row in rows]
            found.append((rows, asked))
    return found


def test_random_frames_are_of_all_learners_together() -> None:
    one, two = (results(run_ranks(actions, size, NUM_ENVS * ALPHA * 2)) for size in (1, 2))
    assert one[0] == two[0] == two[1]
    assert [asked for _, asked in one[0]] == [False, False, True]
