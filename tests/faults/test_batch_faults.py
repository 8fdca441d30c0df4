"""Batches of environments that fail: as a whole, and what others had is not touched.

The batch is environments 1 and 2 of three, of which the last fails.
"""

from __future__ import annotations

import os
import re
import signal
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from processes import alive, processes_below, wait_until, wait_until_gone
from rounds import (
    LAG,
    ROUNDS,
    SEED,
    N,
    T,
    assert_equal,
    assert_goes_on,
    assert_prefix,
    run,
    timeouts_s,
    undisturbed,
)
from tensordict import TensorDictBase
from told import LAST_WORDS, ToldEnv
from told_policy import told_policy

from torchrl_hts import Failure, HTSCollector, WorkerError
from torchrl_hts._learner.learner import environment_seed

pytestmark = pytest.mark.timeout(120)

SOUND = partial(ToldEnv, "none", -1, "")
BATCH = [1, 2]
WHERE = "in round 3, step 1"
AT = 13  # of the life of an environment, in the middle of an episode
FAULTS = {
    "raise": (Failure.RAISED, f"environments 1 to 2 failed {WHERE}.*ValueError: the ball left"),
    "segv": (Failure.CRASHED, f"was killed by SIGSEGV while .*{WHERE}.*Fatal Python error"),
    "kill": (Failure.KILLED, f"was killed by SIGKILL .*{WHERE}"),
    "exit": (Failure.EXITED, f"ended with exit code 7 .*{WHERE}"),
    "hang": (Failure.HUNG, f"made no progress for 4 s.*{WHERE}.*File .*in strike"),
    "nan": (Failure.INVALID, rf"failed {WHERE}.*NaN in 'observation', at \[\[1, 2\]\]"),
    "reward": (Failure.INVALID, f"{WHERE}.*the reward nan"),
}


together = partial(SyncVectorEnv, autoreset_mode=AutoresetMode.SAME_STEP)


def environments(fault: str, at: str | int, marker: Path) -> list[Any]:
    return [SOUND, partial(together, [SOUND, partial(ToldEnv, fault, at, str(marker))])]


def assert_only_the_batch_differs(received: list[TensorDictBase], since: int) -> None:
    """From a transition on: the others', and what was before, are those of single environments."""
    assert len(received) == ROUNDS
    found, expected = (torch.cat(list(each), 1) for each in (received, undisturbed()))
    assert_equal(found[:1], expected[:1])
    ids = found["collector", "traj_ids"]
    for row in BATCH:
        assert set(ids[row, :since].tolist()).isdisjoint(ids[row, since:].tolist())
    assert found["next", "done"][BATCH, since - 1].all()
    assert found["next", "truncated"][BATCH, since - 1].all()
    assert not found["next", "truncated"][BATCH, since:].any()
    for name in ("done", "truncated"):  # the last one before it is marked
        expected["next", name][BATCH, since - 1] = True
    assert_equal(found[BATCH, :since], expected[BATCH, :since])


@pytest.mark.parametrize("fault", FAULTS)
def test_raised(fault: str, tmp_path: Path) -> None:
    received: list[TensorDictBase] = []
    failure, said = FAULTS[fault]
    with pytest.raises(WorkerError) as e:
        run(
            told_policy(),
            environments(fault, AT, tmp_path / "struck"),
            received,
            num_executors=2,
            timeout_s=timeouts_s("executor", fault),
        )
    error = e.value
    assert error.failure is failure
    assert (error.worker, error.env_indices) == ("executor 1", (1, 2))
    assert (error.round, error.step, error.stepped) == (3, 1, (1, 2))
    assert re.search(f"(?s){said}", str(error)), str(error)
    assert LAST_WORDS in error.stderr
    assert_prefix(received, 3)


@pytest.mark.parametrize("fault", FAULTS)
def test_replaced(fault: str, tmp_path: Path) -> None:
    """New episodes in all of the batch, from the transition that failed; nobody else notices."""
    received: list[TensorDictBase] = []
    with pytest.warns(RuntimeWarning, match="(?s)a worker is replaced: .*executor 1") as warned:
        collector = run(
            told_policy(),
            environments(fault, AT, tmp_path / "struck"),
            received,
            num_executors=2,
            timeout_s=timeouts_s("executor", fault),
            on_executor_failure="restart",
        )
    assert len([w for w in warned if w.category is RuntimeWarning]) == 1
    assert collector.statistics().executor_restarts == 1
    assert_only_the_batch_differs(received, AT)
    begun = torch.cat(received, 1)["observation"][BATCH, AT]
    assert (begun[:, 2] == 0).all()
    assert begun[:, 0].tolist() == [environment_seed(SEED, env, 3, 1) for env in BATCH]


def collector_of_five(envs: list[Any]) -> HTSCollector:
    return HTSCollector(
        envs, told_policy(), frames_per_batch=5 * T, total_frames=5 * T * ROUNDS, seed=SEED, lag=LAG
    )


def test_the_steps_ahead_of_one_of_a_batch(tmp_path: Path) -> None:
    """Those of the same environment alone; where nothing is ahead there are none."""
    failing = partial(ToldEnv, "raise", AT, str(tmp_path / "struck"))
    received: list[TensorDictBase] = []
    with collector_of_five([SOUND] * 5) as collector:
        alone = torch.cat([batch.clone() for batch in collector], 1).exclude("policy_version")
        assert collector.steps_ahead(3).shape == (0,)
    envs = [partial(together, [SOUND] * 2), partial(together, [SOUND, SOUND, failing])]
    with collector_of_five(envs) as collector, pytest.raises(WorkerError, match=WHERE):
        received.extend(batch.clone() for batch in collector)
    before = T * len(received)
    for env in (0, 1, 2, 3, 4):
        ahead = collector.steps_ahead(env)
        expected = alone[env, before : before + len(ahead)]
        assert_equal(ahead[:-1], expected[:-1])
        if env >= 2:  # of the batch that has failed, whose actions were there
            assert len(ahead) == AT + 1 - before
            for key in ("observation", "action", "action_log_prob"):
                assert torch.equal(ahead[key], expected[key])
    for env in (5, -1):
        with pytest.raises(ValueError, match="env must be"):
            collector.steps_ahead(env)


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_start_up(fault: str, tmp_path: Path) -> None:
    envs = environments(fault, "make", tmp_path / "struck")
    with pytest.raises(WorkerError, match=f"(?s)environment 1 .*made.*{LAST_WORDS}") as e:
        run(told_policy(), envs, [], num_executors=2, on_executor_failure="restart")
    assert e.value.env_indices == (1,), "of how many nobody knows yet: the number of the entry"


def test_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Its replacement's state is saved instead, and a run goes on from it with the same bits."""
    envs = environments("kill", "save", tmp_path / "struck")
    states: list[Any] = []

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == 2:
            states.append(deepcopy(collector.state_dict()))

    received: list[TensorDictBase] = []
    with pytest.warns(RuntimeWarning, match="a worker is replaced"):
        run(told_policy(), envs, received, body, num_executors=2, on_executor_failure="restart")
    assert_only_the_batch_differs(received, 4 * T)
    assert_goes_on([SOUND, partial(together, [SOUND] * 2)], states[0], received)


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("mode", ["raise", "restart"])
def test_a_process_of_the_batchs_own_is_killed(mode: str, context: str) -> None:
    """Found out at the next step, and the others that it had end with the executor.

    Spawned processes have a tracker beside them, which removes the semaphores that they share.
    """
    games = {"autoreset_mode": AutoresetMode.SAME_STEP, "context": context}
    envs = [SOUND, partial(AsyncVectorEnv, [SOUND] * 2, **games)]
    children: set[int] = set()
    semaphores: set[Path] = set()

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == 1:
            executor = collector.worker_pids()["executor 1"]
            children.update(processes_below(executor))
            stepping = {pid for pid in children if not _is_tracker(pid)}
            assert len(stepping) == 2
            semaphores.update(_named_semaphores(executor))
            assert bool(semaphores) == (context == "spawn")
            os.kill(min(stepping), signal.SIGKILL)
            wait_until_gone([min(stepping)])

    received: list[TensorDictBase] = []
    options: dict[str, Any] = {"num_executors": 2, "on_executor_failure": mode}
    if mode == "raise":
        with pytest.raises(WorkerError, match="environments 1 to 2 failed") as e:
            run(told_policy(), envs, received, body, **options)
        assert e.value.env_indices == (1, 2)
        assert_prefix(received)
    else:
        with pytest.warns(RuntimeWarning, match="executor 1"):
            collector = run(told_policy(), envs, received, body, **options)
        assert collector.statistics().executor_restarts == 1
        assert len(received) == ROUNDS
        for batch, expected in zip(received, undisturbed(), strict=True):
            assert_equal(batch[:1], expected[:1])
    wait_until(lambda: not any(map(alive, children)))
    assert not any(path.exists() for path in semaphores)


def _is_tracker(pid: int) -> bool:
    return "resource_tracker" in Path(f"/proc/{pid}/cmdline").read_text()


def _named_semaphores(pid: int) -> set[Path]:
    """The files of those that a process has open."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    open_ones = {int(line.split()[4]) for line in maps if "/dev/shm/sem." in line}
    return {path for path in Path("/dev/shm").glob("sem.*") if _inode(path) in open_ones}


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:  # another test's
        return None


def test_during_shutdown(tmp_path: Path) -> None:
    """A batch that hangs where it is closed ends at the time-out, and the run was whole."""
    envs = environments("hang", "close", tmp_path / "struck")
    received: list[TensorDictBase] = []
    collector = HTSCollector(
        envs, told_policy(), frames_per_batch=N * T, num_executors=2, seed=SEED, lag=LAG
    )
    received.append(next(iter(collector)).clone())
    kept = collector.worker_pids().values()
    with pytest.warns(RuntimeWarning, match=r"executor 1 had not ended"):
        collector.shutdown(timeout=1.0)
    wait_until_gone(kept)
    assert (tmp_path / "struck").exists()
    assert_prefix(received)
