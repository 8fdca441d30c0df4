"""Runs of six rounds in which something fails, and the run without a fault that they are held to.

Rows are counted as they are compared, for the table that is printed at the end (`fault_table.py`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from probe import all_idle, finished_steps, lent_rounds
from processes import alive, wait_until
from tensordict import TensorDictBase
from told import ToldEnv
from told_policy import learn, told_policy

from torchrl_hts import HTSCollector
from torchrl_hts._policy.row_bits import row_bits

N, T, ROUNDS, LAG, SEED = 3, 4, 6, 1, 3
VICTIM = 1  # the environment that fails, in an executor of its own
OTHERS = [env for env in range(N) if env != VICTIM]
TIMEOUT_S = 4.0

# Until a failure is told, a worker is replaced and the run over, or everybody has ended: on a
# machine that may be busy with other things.
SOON_S = 60.0

Body = Callable[[HTSCollector, int], None]


class Rows:
    """How many rows of this test's runs were compared, and how many were not as they should be."""

    compared = 0
    lost = 0


class Tried:
    """Notes for the table that is printed at the end (`fault_table.py`)."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self.record = record

    def __call__(self, worker: str, fault: str, phase: str, outcome: str) -> None:
        """Note a case."""
        self.record("fault", (worker, fault, phase, outcome))

    def told(self, fault: str, marker: Path) -> None:
        """A fault has been raised: note how long after it struck."""
        self.took("told", fault, time.time() - marker.stat().st_mtime)

    def went_on(self, fault: str, marker: Path) -> None:
        """A worker was replaced, and the run is over: note how long after the fault struck."""
        self.took("replaced and the run over", fault, time.time() - marker.stat().st_mtime)

    def took(self, what: str, fault: str, seconds: float) -> None:
        """Note how long something took, which must not be long."""
        self.record("seconds", (what, fault, seconds))
        assert seconds < SOON_S


def run(
    policy: Any,
    envs: list[Any],
    received: list[TensorDictBase],
    body: Body = lambda collector, round_: None,
    **kwargs: Any,
) -> HTSCollector:
    """Collect all rounds, with an update after each; what came goes into ``received``."""
    kwargs = {"num_executors": N, "num_actors": 1, "seed": SEED, "lag": LAG} | kwargs
    with HTSCollector(
        envs, policy, frames_per_batch=N * T, total_frames=N * T * ROUNDS, **kwargs
    ) as collector:
        for round_, batch in enumerate(collector):
            received.append(batch.clone())
            body(collector, round_)
            learn(policy)
    return collector


def run_until_shutdown(
    policy: Any,
    envs: list[Any],
    received: list[TensorDictBase],
    finish: Callable[[HTSCollector], None],
) -> float:
    """Collect as many rounds, with no end in sight, and let ``finish`` end it.

    The round that is open then was opened when all that is learned from was there.

    Returns:
        How long ``finish`` took, in seconds.
    """
    collector = HTSCollector(
        envs, policy, frames_per_batch=N * T, num_executors=N, seed=SEED, lag=LAG
    )
    for batch in collector:
        received.append(batch.clone())
        if len(received) == ROUNDS:
            break
        rest(collector)
        learn(policy)
    before = time.monotonic()
    finish(collector)
    return time.monotonic() - before


def assert_goes_on(envs: list[Any], state: dict[str, Any], received: list[TensorDictBase]) -> None:
    """From a state that was taken after round 2, with the bits of the rounds that came then."""
    policy, resumed = told_policy(), []
    with HTSCollector(
        envs, policy, frames_per_batch=N * T, total_frames=N * T * ROUNDS,
        num_executors=1, seed=0, lag=LAG,
    ) as collector:  # fmt: skip
        collector.load_state_dict(state)
        learn(policy)  # the update that the state was taken before
        for batch in collector:
            resumed.append(batch.clone())
            learn(policy)
    for batch, expected in zip(resumed, received[3:], strict=True):
        assert_equal(batch, expected)


@cache
def undisturbed() -> list[TensorDictBase]:
    """The batches of a run without a fault."""
    received: list[TensorDictBase] = []
    run(told_policy(), sound_environments(), received)
    assert len(received) == ROUNDS
    return received


def sound_environments() -> list[Any]:
    """Environments that don't fail."""
    return [partial(ToldEnv, "none", -1, "")] * N


def environments(fault: str, at: str | int, marker: Path) -> list[Any]:
    """One that fails, among others that don't."""
    envs = sound_environments()
    envs[VICTIM] = partial(ToldEnv, fault, at, str(marker))
    return envs


def timeouts_s(kind: str, fault: str) -> dict[str, float] | None:
    """A time-out where one is needed: elsewhere a slow machine is no fault."""
    return {kind: TIMEOUT_S} if fault in ("hang", "stop") else None


def rest(collector: HTSCollector) -> None:
    """Wait until everybody has done all that there is to do."""
    steps, finished = finished_steps(collector), lent_rounds(collector) + LAG
    wait_until(lambda: list(steps) == [finished * T] * N and all_idle(collector))


def kill(collector: HTSCollector, name: str) -> None:
    """Kill a worker while everybody rests."""
    rest(collector)
    pid = collector.worker_pids()[name]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))


def assert_equal(batch: TensorDictBase, expected: TensorDictBase) -> None:
    """Bit for bit."""
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    different = np.zeros(batch.numel(), dtype=bool)
    for key in batch.keys(True, True):
        one, other = batch[key], expected[key]
        assert (one.dtype, one.shape) == (other.dtype, other.shape), key
        one, other = (value.reshape(batch.numel(), -1) for value in (one, other))
        different |= (row_bits([one]) != row_bits([other])).any(1)
    Rows.compared += batch.numel()
    Rows.lost += int(different.sum())
    assert not different.any()


def assert_prefix(received: list[TensorDictBase], round_: int | None = None) -> None:
    """The learner has got what an undisturbed run gives, and nothing else.

    Args:
        round_: in which a worker failed: what was learned from before it began must be there.
    """
    if round_ is not None:
        Rows.lost += max(0, round_ - LAG - len(received)) * N * T
        assert round_ - LAG <= len(received) <= round_
    for batch, expected in zip(received, undisturbed(), strict=False):
        assert_equal(batch, expected)


def assert_whole(received: list[TensorDictBase]) -> None:
    """The learner has got all that an undisturbed run gives."""
    Rows.lost += (ROUNDS - len(received)) * N * T
    assert len(received) == ROUNDS
    assert_prefix(received)


def assert_only_the_victim_differs(received: list[TensorDictBase], since: int) -> None:
    """The others' rows, and the victim's before, are those of an undisturbed run."""
    Rows.lost += (ROUNDS - len(received)) * N * T
    assert len(received) == ROUNDS
    for batch, expected in zip(received, undisturbed(), strict=True):
        assert_equal(batch[OTHERS], expected[OTHERS])
    rows, expected_rows = (
        torch.cat([batch[VICTIM] for batch in batches]) for batches in (received, undisturbed())
    )
    ids = rows["collector", "traj_ids"]
    assert set(ids[:since].tolist()).isdisjoint(ids[since:].tolist())
    assert (ids % N == VICTIM).all()
    if since:
        for name in ("done", "truncated"):  # the last one before it is marked
            expected_rows["next", name][since - 1] = rows["next", name][since - 1]
        assert_equal(rows[:since], expected_rows[:since])
