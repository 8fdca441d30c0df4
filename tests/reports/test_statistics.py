"""What a collector counts, against what it has done."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from functools import partial
from typing import Any

import pytest
from environments import EchoEnv
from policies import marked

from torchrl_hts import HTSCollector, Statistics, WorkerStatistics
from torchrl_hts._policy.invariance import InvariantSizes

pytestmark = pytest.mark.usefixtures("nothing_left")

N, ALPHA, ROUNDS = 4, 3, 5


def test_counts_add_up() -> None:
    """Each step is counted once by an executor and once by an actor."""
    with HTSCollector(
        [partial(EchoEnv, lengths=(5,))] * N,
        marked(),
        frames_per_batch=N * ALPHA,
        total_frames=N * ALPHA * ROUNDS,
        num_executors=2,
        num_actors=2,
    ) as collector:
        for _ in collector:
            pass
        found = collector.statistics()
    steps = N * ALPHA * ROUNDS
    assert found.frames == steps
    assert sum(found.step_times.values()) == steps
    assert sum(rows * count for rows, count in found.batch_sizes.items()) == steps
    assert sum(found.batch_sizes.values()) == found.actor_batches
    assert min(found.batch_sizes) >= 1
    assert max(found.batch_sizes) <= N
    workers = found.workers
    assert list(workers) == ["executor 0", "executor 1", "actor 0", "actor 1"]
    assert [workers[f"executor {index}"].events for index in (0, 1)] == [steps // 2] * 2
    passes = sum(workers[f"actor {index}"].events for index in (0, 1))
    assert passes == found.actor_batches
    for name, worker in workers.items():
        assert worker.busy_s > 0
        if "actor" in name:
            assert worker.action_waiting_s == worker.round_waiting_s == 0
        else:
            assert worker.observation_waiting_s == worker.gathering_s == 0
        assert worker.private_bytes is None, "nobody asked"
    assert found.shared_bytes > 0
    assert found.learner_private_bytes is None, "nobody asked"
    shares = {
        "executor": ("busy", "action_waiting", "round_waiting"),
        "actor": ("busy", "observation_waiting", "gathering"),
    }
    for kind, causes in shares.items():
        parts = [getattr(found, f"{kind}_{cause}_share") for cause in causes]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.frames = 0


class SlowStepEnv(EchoEnv):
    """Takes 20 ms for its third step."""

    def step(self, action: Any) -> Any:
        if self.t == 2:
            time.sleep(0.02)
        return super().step(action)


def test_a_slow_step_is_in_the_bucket_of_its_time() -> None:
    with HTSCollector([SlowStepEnv], marked(), frames_per_batch=4, total_frames=4) as collector:
        for _ in collector:
            pass
        found = collector.statistics()
    assert any(seconds > 0.02 for seconds in found.step_times)
    at_least_s = sum(seconds / 2 * count for seconds, count in found.step_times.items())
    assert 0.01 < at_least_s <= found.workers["executor 0"].busy_s


def test_printed_it_is_a_table_of_ten_lines() -> None:
    with HTSCollector(
        [partial(EchoEnv, lengths=(5,))] * N,
        marked(),
        frames_per_batch=N * ALPHA,
        total_frames=N * ALPHA * ROUNDS,
        num_executors=2,
        num_actors=1,
    ) as collector:
        early = str(collector.statistics()).splitlines()
        for _ in collector:
            pass
        found = collector.statistics(memory=True)
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in str(found).splitlines())
    assert list(lines) == [
        "collected", "speed", "learner", "2 executors", "1 actor", "passes", "batch sizes", "steps",
        "memory", "replaced",
    ]  # fmt: skip
    assert lines["collected"] == "60 frames in 5 rounds; 12 episodes ended"
    assert lines["batch sizes"] == str(found.invariant_sizes)
    assert lines["replaced"] == "0 executors, 0 actors"
    assert len(early) == 10
    assert early[7].split() == ["steps", "none", "yet"]


def test_the_table_fits_whatever_was_counted() -> None:
    """After a long run of many workers, on a machine where few batch sizes agree."""
    many = {
        f"{kind} {index}": WorkerStatistics(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 10**9, 10**12)
        for kind in ("executor", "actor")
        for index in range(256)
    }
    large, share = 10**12, 1.0
    found = Statistics(
        frames=large,
        rounds=large,
        elapsed_s=1e8,
        frames_per_second=1e7,
        learner_waiting_s=1e8,
        learner_waiting_share=share,
        executor_busy_share=share,
        executor_action_waiting_share=share,
        executor_round_waiting_share=share,
        actor_busy_share=share,
        actor_observation_waiting_share=share,
        actor_gathering_share=share,
        actor_batches=large,
        mean_actor_batch_size=2048.0,
        padding_share=share,
        episodes=large,
        executor_restarts=large,
        actor_restarts=large,
        invariant_sizes=InvariantSizes(tuple(range(4, 2049, 4)), 2048, fixed_rows=False),
        batch_sizes={2048: large},
        step_times={2**bucket / 1e9: large for bucket in range(40)},
        workers=many,
        shared_bytes=10**12,
        learner_private_bytes=10**12,
    )
    lines = str(found).splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if line.endswith("...")] == [lines[6]], "a list of sizes"


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's /proc")
def test_memory_when_asked_for() -> None:
    with HTSCollector([EchoEnv] * 2, marked(), frames_per_batch=4) as collector:
        next(iter(collector))
        found = collector.statistics(memory=True)
        own = [worker.private_bytes for worker in found.workers.values()]
        for private_bytes in (*own, found.learner_private_bytes):
            assert private_bytes is not None
            assert 100_000 < private_bytes < 2_000_000_000
    after = collector.statistics(memory=True).workers.values()
    assert {worker.private_bytes for worker in after} == {None}
