"""Faults x phases x workers: what is said, what the learner had got, and that nothing remains.

Each fault is injected at an exact point, by an environment or a policy that is told of it, or by
the loop itself while everybody is at rest. What an undisturbed run gives is what is compared with,
bit for bit. A table of the cases is printed at the end (see `conftest.py`).
"""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import alive, wait_until
from tensordict import TensorDictBase
from told import LAST_WORDS, ToldEnv
from told_policy import CALIBRATION, learn, told_policy

from torchrl_hts import Failure, HTSCollector, WorkerError
from torchrl_hts.learner import environment_seed
from torchrl_hts.storage import Counter

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(120)]

N, T, ROUNDS, LAG, SEED = 3, 4, 6, 1, 3
VICTIM = 1  # the environment that fails, in an executor of its own
OTHERS = [env for env in range(N) if env != VICTIM]
TIMEOUT_S = 4.0

Body = Callable[[HTSCollector, int], None]
Record = Callable[[str, object], None]


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


@cache
def undisturbed() -> list[TensorDictBase]:
    """The batches of a run without a fault."""
    received: list[TensorDictBase] = []
    run(told_policy(), [partial(ToldEnv, "none", -1, "")] * N, received)
    assert len(received) == ROUNDS
    return received


def timeouts_s(kind: str, fault: str) -> dict[str, float] | None:
    """A time-out where one is needed: elsewhere a slow machine is no fault."""
    return {kind: TIMEOUT_S} if fault in ("hang", "stop") else None


def environments(fault: str, at: str | int, marker: Path) -> list[Any]:
    """One that fails, among others that don't."""
    envs = [partial(ToldEnv, "none", -1, "")] * N
    envs[VICTIM] = partial(ToldEnv, fault, at, str(marker))
    return envs


def assert_equal(batch: TensorDictBase, expected: TensorDictBase) -> None:
    """Bit for bit."""
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    for key in batch.keys(True, True):
        assert torch.equal(batch[key], expected[key]), key


def assert_prefix(received: list[TensorDictBase]) -> None:
    """The learner has got what an undisturbed run gives, and nothing else."""
    for batch, expected in zip(received, undisturbed(), strict=False):
        assert_equal(batch, expected)


FAULTS = {
    "raise": (Failure.RAISED, "environment 1 failed {where}.*ValueError: the ball left"),
    "memory": (Failure.OUT_OF_MEMORY, "failed for want of memory {where}.*no room for the ball"),
    "segv": (Failure.CRASHED, r"was killed by SIGSEGV{while}.*Fatal Python error: Segm"),
    "abort": (Failure.CRASHED, r"was killed by SIGABRT{while}.*Fatal Python error: Aborted"),
    "kill": (Failure.KILLED, r"was killed by SIGKILL \(.*for want of memory\){while}"),
    "exit": (Failure.EXITED, "ended with exit code 7{while}"),
    "hang": (Failure.HUNG, r"made no progress for 4 s.*{while}.*File .*in strike"),
    "stop": (Failure.HUNG, "made no progress for 4 s.*{while}"),
    "nan": (Failure.INVALID, r"failed {where}.*NaN in 'observation', at \[\[2\]\] of shape \(4,\)"),
    "shape": (Failure.INVALID, r"{where}.*'observation' of shape \(2,\); .* says \(4,\)"),
    "dtype": (Failure.INVALID, r"{where}.*'observation' of data type complex128; .*float64"),
    "reward": (Failure.INVALID, r"{where}.*returned the reward nan; expected one number"),
}
# Name: the step of the environment's life, its round and its step there.
STEPS = {
    "first step": (0, 0, 0),
    "first round": (2, 0, 2),
    "after an end": (5, 1, 1),
    "end of a round": (11, 2, 3),
    "begin of a round": (12, 3, 0),
    "mid-round": (14, 3, 2),
}
EXECUTOR_CASES = [
    *((fault, "mid-round") for fault in FAULTS),
    *(("kill", phase) for phase in STEPS if phase != "mid-round"),
    *(("raise", phase) for phase in ("first step", "begin of a round")),
]


@pytest.mark.parametrize(("fault", "phase"), EXECUTOR_CASES)
def test_environment_raise(fault: str, phase: str, tmp_path: Path, record_property: Record) -> None:
    """One error with all that is known; the rounds before it came whole."""
    step_of_life, round_, step = STEPS[phase]
    failure, said = FAULTS[fault]
    received: list[TensorDictBase] = []
    with pytest.raises(WorkerError) as e:
        run(
            told_policy(),
            environments(fault, step_of_life, tmp_path / "struck"),
            received,
            timeout_s=timeouts_s("executor", fault),
        )
    error = e.value
    assert error.failure is failure
    assert (error.worker, error.worker_kind, error.worker_index) == ("executor 1", "executor", 1)
    assert (error.env_indices, error.round, error.step) == ((VICTIM,), round_, step)
    where = rf"in round {round_}, step {step}"
    pattern = said.replace("{where}", where)
    pattern = pattern.replace("{while}", rf" while environment 1 was stepped {where}")
    assert re.search(f"(?s){pattern}", str(error)), str(error)
    assert LAST_WORDS in error.stderr
    assert LAST_WORDS in str(error)
    if failure is Failure.CRASHED:
        assert error.exit_signal == {"segv": signal.SIGSEGV, "abort": signal.SIGABRT}[fault]
    assert len(received) <= round_
    assert_prefix(received)
    record_property("fault", ("executor", fault, phase, "raise"))


@pytest.mark.parametrize(("fault", "phase"), EXECUTOR_CASES)
def test_environment_restart(
    fault: str, phase: str, tmp_path: Path, record_property: Record
) -> None:
    """A new episode from the transition that failed; nobody else notices."""
    step_of_life, round_, step = STEPS[phase]
    received: list[TensorDictBase] = []
    with pytest.warns(RuntimeWarning, match="(?s)a worker is replaced: .*executor 1") as warned:
        collector = run(
            told_policy(),
            environments(fault, step_of_life, tmp_path / "struck"),
            received,
            timeout_s=timeouts_s("executor", fault),
            on_executor_failure="restart",
        )
    assert len([w for w in warned if w.category is RuntimeWarning]) == 1
    statistics = collector.statistics()
    assert (statistics.executor_restarts, statistics.actor_restarts) == (1, 0)
    assert_only_the_victim_differs(received, step_of_life)
    rows = torch.cat([batch[VICTIM] for batch in received])
    # What has begun there began with a seed of its own, and a reset.
    assert rows["observation"][step_of_life, 2] == 0
    assert rows["observation"][step_of_life, 0] == environment_seed(SEED, VICTIM, round_, 1)
    if step:
        assert rows["next", "truncated"][step_of_life - 1] == (phase != "after an end")
        assert rows["next", "done"][step_of_life - 1]
    assert not rows["next", "truncated"][step_of_life:].any()
    record_property("fault", ("executor", fault, phase, "restart"))


def assert_only_the_victim_differs(received: list[TensorDictBase], since: int) -> None:
    """The others' rows, and the victim's before, are those of an undisturbed run."""
    assert len(received) == ROUNDS
    for batch, expected in zip(received, undisturbed(), strict=True):
        assert_equal(batch[OTHERS], expected[OTHERS])
    rows, expected_rows = (
        torch.cat([batch[VICTIM] for batch in batches]) for batches in (received, undisturbed())
    )
    for key in rows.keys(True, True):
        flag = key[0] == "next" and key[-1] in ("done", "truncated")
        end = max(0, since - flag)  # the last one before it is marked
        assert torch.equal(rows[key][:end], expected_rows[key][:end]), key
    ids = rows["collector", "traj_ids"]
    assert set(ids[:since].tolist()).isdisjoint(ids[since:].tolist())
    assert (ids % N == VICTIM).all()


POLICY_FAULTS = {
    "raise": (Failure.RAISED, "the policy failed in round 3, for .*ValueError: the ball left"),
    "memory": (Failure.OUT_OF_MEMORY, "the policy failed for want of memory in round 3"),
    "nan": (Failure.INVALID, "NaN in 'logits' for environment.*parameters and inputs are finite"),
    "segv": (Failure.CRASHED, "was killed by SIGSEGV in round 3.*Fatal Python error: Segm"),
    "kill": (Failure.KILLED, r"was killed by SIGKILL \(.*for want of memory\) in round 3"),
    "exit": (Failure.EXITED, "ended with exit code 7 in round 3, for environment"),
    "hang": (Failure.HUNG, "made no progress for 4 s.* in round 3.*File .*in strike"),
}


@pytest.mark.parametrize("mode", ["raise", "restart"])
@pytest.mark.parametrize("fault", POLICY_FAULTS)
def test_policy(fault: str, mode: str, tmp_path: Path, record_property: Record) -> None:
    """A replaced actor leaves no trace in any batch; a policy that raises is not tried again."""
    failure, said = POLICY_FAULTS[fault]
    policy = told_policy(fault, 2, str(tmp_path / "struck"))
    envs, received = environments("none", -1, tmp_path), []  # type: ignore[var-annotated]
    options: dict[str, Any] = {"num_actors": 2}
    options |= {"on_executor_failure": mode, "timeout_s": timeouts_s("actor", fault)}
    record_property("fault", ("actor", fault, "mid-round", mode))
    if mode == "restart" and failure not in (
        Failure.RAISED, Failure.INVALID, Failure.OUT_OF_MEMORY,
    ):  # fmt: skip
        with pytest.warns(RuntimeWarning, match="(?s)a worker is replaced: actor"):
            collector = run(policy, envs, received, **options)
        assert collector.statistics().actor_restarts == 1
        assert len(received) == ROUNDS
        assert_prefix(received)
        return
    with pytest.raises(WorkerError, match=f"(?s){said}") as e:
        run(policy, envs, received, **options)
    assert (e.value.failure, e.value.worker_kind, e.value.round) == (failure, "actor", 3)
    assert set(e.value.env_indices) <= set(range(N))
    assert e.value.env_indices
    assert LAST_WORDS in e.value.stderr
    assert len(received) <= 3
    assert_prefix(received)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "environment 1 failed while it was made, .*ValueError: the ball left"),
        ("kill", "was killed by SIGKILL .* while environment 1 was made"),
        ("segv", "was killed by SIGSEGV while environment 1 was made"),
        ("hang", "made no progress for 4 s .* while environment 1 was made"),
    ],
)
@pytest.mark.parametrize("mode", ["raise", "restart"])
def test_start_up_of_an_executor(
    fault: str, said: str, mode: str, tmp_path: Path, record_property: Record
) -> None:
    """What fails before the first round is raised at once, whatever is to be done later."""
    envs = environments(fault, "make", tmp_path / "struck")
    with pytest.raises(WorkerError, match=f"(?s){said}.*{LAST_WORDS}") as e:
        run(
            told_policy(),
            envs,
            [],
            on_executor_failure=mode,
            timeout_s=timeouts_s("executor", fault),
        )
    assert (e.value.worker, e.value.env_indices) == ("executor 1", (VICTIM,))
    record_property("fault", ("executor", fault, "start-up", mode))


@pytest.mark.parametrize("fault", ["raise", "kill", "segv"])
def test_first_reset(fault: str, tmp_path: Path, record_property: Record) -> None:
    """It may fail in its first reset too, and be replaced."""
    envs, received = environments(fault, "reset", tmp_path / "struck"), []  # type: ignore[var-annotated]
    with pytest.raises(WorkerError, match=r"(?s)environment 1 .* in round 0, step 0"):
        run(told_policy(), envs, received)
    assert not received
    (tmp_path / "struck").unlink()
    with pytest.warns(RuntimeWarning, match="a worker is replaced"):
        run(told_policy(), envs, received, on_executor_failure="restart")
    assert_only_the_victim_differs(received, 0)
    record_property("fault", ("executor", fault, "first reset", "raise"))
    record_property("fault", ("executor", fault, "first reset", "restart"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "ValueError: the ball left"),
        ("kill", "actor . .* was killed by SIGKILL .* while it calibrated"),
        ("segv", "was killed by SIGSEGV while it calibrated"),
    ],
)
def test_calibration(fault: str, said: str, tmp_path: Path, record_property: Record) -> None:
    """An actor fails while it finds out which batch sizes agree."""
    policy = told_policy(fault, CALIBRATION, str(tmp_path / "struck"))
    with pytest.raises(WorkerError, match=f"(?s){said}.*{LAST_WORDS}") as e:
        run(policy, environments("none", -1, tmp_path), [])
    assert e.value.worker_kind == "actor"
    record_property("fault", ("actor", fault, "calibration", "raise"))


def kill(collector: HTSCollector, name: str) -> None:
    """Kill a worker while everybody has done all that there is to do."""
    steps = collector._crew.schedule.steps
    finished = collector._crew.schedule.lent + LAG
    counters = collector._memory.counters
    wait_until(lambda: list(steps) == [finished * T] * N and not counters[:, Counter.AT].any())
    pid = collector.worker_pids()[name]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))


@pytest.mark.parametrize("name", ["executor 1", "actor 0"])
def test_while_the_learner_learns(name: str, record_property: Record) -> None:
    """A worker dies while it rests: the learner is told when it next waits, or not at all."""
    envs = environments("none", -1, Path())

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == 2:
            kill(collector, name)

    received: list[TensorDictBase] = []
    with pytest.raises(WorkerError, match=f"{name} .*was killed by SIGKILL.* between two"):
        run(told_policy(), envs, received, body)
    assert len(received) == 4  # round 3 was full
    assert_prefix(received)
    received = []
    with pytest.warns(RuntimeWarning, match=name):
        run(told_policy(), envs, received, body, on_executor_failure="restart")
    if name == "actor 0":
        assert_prefix(received)
    else:
        assert_only_the_victim_differs(received, 4 * T)
    assert len(received) == ROUNDS
    for mode in ("raise", "restart"):
        record_property("fault", (name.split()[0], "kill", "learner learns", mode))


@pytest.mark.parametrize("fault", ["kill", "segv"])
def test_while_a_checkpoint_is_written(fault: str, tmp_path: Path, record_property: Record) -> None:
    """An engine dies while its state is asked for. Its replacement's state is saved instead."""
    envs = environments(fault, "save", tmp_path / "struck")
    states: list[Any] = []

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == 2:
            states.append(deepcopy(collector.state_dict()))

    received: list[TensorDictBase] = []
    with pytest.raises(WorkerError, match=r"executor 1 .* was killed by SIG(KILL|SEGV)"):
        run(told_policy(), envs, received, body)
    assert len(received) == 3
    assert_prefix(received)
    assert not states
    (tmp_path / "struck").unlink()
    received = []
    with pytest.warns(RuntimeWarning, match="a worker is replaced"):
        run(told_policy(), envs, received, body, on_executor_failure="restart")
    assert_only_the_victim_differs(received, 4 * T)
    assert received[3]["next", "truncated"][VICTIM, -1], "the learner hasn't had it yet"
    assert not received[3]["next", "truncated"][OTHERS].any()
    # The checkpoint goes on with the same bits as the run that it was taken from.
    resumed = []
    policy = told_policy()
    with HTSCollector(
        environments("none", -1, tmp_path), policy, frames_per_batch=N * T,
        total_frames=N * T * ROUNDS, num_executors=1, seed=0, lag=LAG,
    ) as collector:  # fmt: skip
        collector.load_state_dict(states[0])
        learn(policy)  # the update that the state was taken before
        for batch in collector:
            resumed.append(batch.clone())
            learn(policy)
    assert len(resumed) == ROUNDS - 3
    for batch, expected in zip(resumed, received[3:], strict=True):
        assert_equal(batch, expected)
    for mode in ("raise", "restart"):
        record_property("fault", ("executor", fault, "checkpoint", mode))


@pytest.mark.parametrize("fault", ["raise", "kill", "segv", "hang", "exit"])
def test_during_shutdown(fault: str, tmp_path: Path, record_property: Record) -> None:
    """Whatever an environment does when it is closed: the run was whole, and it ends."""
    received: list[TensorDictBase] = []
    envs = environments(fault, "close", tmp_path / "struck")
    policy = told_policy()
    collector = HTSCollector(envs, policy, frames_per_batch=N * T, num_executors=N, seed=3, lag=LAG)
    for batch in collector:
        received.append(batch.clone())
        learn(policy)
        if len(received) == ROUNDS:
            break
    collector.shutdown(timeout=0.5)
    assert_prefix(received)
    assert (tmp_path / "struck").exists()
    record_property("fault", ("executor", fault, "shutdown", "raise"))


def test_gives_up(tmp_path: Path, record_property: Record) -> None:
    """An environment that always fails is replaced so many times, and then raises."""
    envs = environments("raise", 2, tmp_path / "no" / "such" / "place")  # each time
    received: list[TensorDictBase] = []
    with (
        pytest.warns(RuntimeWarning, match="a worker is replaced") as warned,
        pytest.raises(WorkerError, match=r"(?s)environment 1 failed .*It was not replaced: 2 had"),
    ):
        run(told_policy(), envs, received, on_executor_failure="restart", max_restarts=2)
    assert len([w for w in warned if w.category is RuntimeWarning]) == 2
    record_property("fault", ("executor", "raise", "always", "restart"))


def test_several_at_once(tmp_path: Path, record_property: Record) -> None:
    """Executors and both actors die between two rounds; every one is replaced."""
    received: list[TensorDictBase] = []

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == 2:
            for name in ("executor 1", "actor 0", "actor 1"):
                kill(collector, name)

    with pytest.warns(RuntimeWarning, match="a worker is replaced"):
        collector = run(
            told_policy(),
            environments("none", -1, tmp_path),
            received,
            body,
            on_executor_failure="restart",
            num_actors=2,
        )
    statistics = collector.statistics()
    assert (statistics.executor_restarts, statistics.actor_restarts) == (1, 2)
    assert_only_the_victim_differs(received, 4 * T)
    record_property("fault", ("all", "kill", "learner learns", "restart"))


def test_the_replacement_depends_on_nothing_else(tmp_path: Path, record_property: Record) -> None:
    """The seed of a new episode: from seed, environment, round and number of restarts alone."""
    runs: list[list[TensorDictBase]] = [[], []]
    for index, received in enumerate(runs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            run(
                told_policy(),
                environments(("kill", "raise")[index], 14, tmp_path / f"struck {index}"),
                received,
                on_executor_failure="restart",
                num_actors=1 + index,
            )
    for one, other in zip(*runs, strict=True):
        assert_equal(one, other)
    record_property("fault", ("executor", "kill, raise", "twice alike", "restart"))
