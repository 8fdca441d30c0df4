"""Executors that fail in any way, in any phase: what is said, and what the learner had got.

Each fault is injected at an exact point, by an environment or a policy that is told of it, or by
the loop itself while everybody is at rest.
"""

from __future__ import annotations

import re
import signal
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import wait_until
from rounds import (
    LAG,
    OTHERS,
    ROUNDS,
    SEED,
    VICTIM,
    Body,
    T,
    Tried,
    assert_equal,
    assert_goes_on,
    assert_only_the_victim_differs,
    assert_prefix,
    assert_whole,
    environments,
    kill,
    run,
    run_until_shutdown,
    sound_environments,
    timeouts_s,
    undisturbed,
)
from tensordict import TensorDictBase
from told import ALWAYS, LAST_WORDS, ToldEnv
from told_policy import CALIBRATION, told_policy

from torchrl_hts import Failure, HTSCollector, WorkerError
from torchrl_hts._learner.learner import environment_seed

pytestmark = pytest.mark.timeout(120)

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
# A stopped process is found out as one that hangs is, after seconds: once is enough.
EXECUTOR_CASES = [
    (fault, phase) for fault in FAULTS for phase in STEPS if fault != "stop" or phase == "mid-round"
]


@pytest.mark.parametrize(("fault", "phase"), EXECUTOR_CASES)
def test_raised(fault: str, phase: str, tmp_path: Path, tried: Tried) -> None:
    """One error with all that is known; the rounds before it came whole."""
    step_of_life, round_, step = STEPS[phase]
    failure, said = FAULTS[fault]
    marker = tmp_path / "struck"
    received: list[TensorDictBase] = []
    with pytest.raises(WorkerError) as e:
        run(
            told_policy(),
            environments(fault, step_of_life, marker),
            received,
            timeout_s=timeouts_s("executor", fault),
        )
    tried.told(fault, marker)
    error = e.value
    assert error.failure is failure
    assert (error.worker, error.worker_kind, error.worker_index) == ("executor 1", "executor", 1)
    assert (error.env_indices, error.round, error.step) == ((VICTIM,), round_, step)
    assert error.stepped == (VICTIM,)
    where = rf"in round {round_}, step {step}"
    pattern = said.replace("{where}", where)
    pattern = pattern.replace("{while}", rf" while environment 1 was stepped {where}")
    assert re.search(f"(?s){pattern}", str(error)), str(error)
    assert LAST_WORDS in error.stderr
    assert LAST_WORDS in str(error)
    if failure is Failure.CRASHED:
        assert error.exit_signal == {"segv": signal.SIGSEGV, "abort": signal.SIGABRT}[fault]
    assert_prefix(received, round_)
    tried("executor", fault, phase, "raised")


@pytest.mark.parametrize(("fault", "phase"), EXECUTOR_CASES)
def test_replaced(fault: str, phase: str, tmp_path: Path, tried: Tried) -> None:
    """A new episode from the transition that failed; nobody else notices."""
    step_of_life, round_, step = STEPS[phase]
    marker = tmp_path / "struck"
    received: list[TensorDictBase] = []
    with pytest.warns(RuntimeWarning, match="(?s)a worker is replaced: .*executor 1") as warned:
        collector = run(
            told_policy(),
            environments(fault, step_of_life, marker),
            received,
            timeout_s=timeouts_s("executor", fault),
            on_executor_failure="restart",
        )
    tried.went_on(fault, marker)
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
    tried("executor", fault, phase, "replaced")


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
def test_start_up(fault: str, said: str, mode: str, tmp_path: Path, tried: Tried) -> None:
    """What fails before the first round is raised at once, whatever is to be done later."""
    marker = tmp_path / "struck"
    envs = environments(fault, "make", marker)
    with pytest.raises(WorkerError, match=f"(?s){said}.*{LAST_WORDS}") as e:
        run(
            told_policy(),
            envs,
            [],
            on_executor_failure=mode,
            timeout_s=timeouts_s("executor", fault),
        )
    tried.told(fault, marker)
    assert (e.value.worker, e.value.env_indices) == ("executor 1", (VICTIM,))
    assert e.value.stepped == ()
    tried("executor", fault, "start-up", "raised")


@pytest.mark.parametrize("mode", ["raise", "restart"])
def test_calibration(mode: str, tmp_path: Path, tried: Tried) -> None:
    """An executor dies while the actor finds out which batch sizes agree."""
    marker, victim = tmp_path / "struck", tmp_path / "victim"
    envs = environments(f"tell {victim}", "make", tmp_path / "told")
    policy = told_policy(f"kill {victim}", CALIBRATION, str(marker))
    said = "executor 1 .* was killed by SIGKILL"
    with pytest.raises(WorkerError, match=said) as e:
        run(policy, envs, [], on_executor_failure=mode)
    tried.told("kill", marker)
    assert (e.value.failure, e.value.worker) == (Failure.KILLED, "executor 1")
    tried("executor", "kill", "calibration", "raised")


@pytest.mark.parametrize("fault", ["raise", "memory", "segv", "abort", "kill", "exit"])
def test_first_reset(fault: str, tmp_path: Path, tried: Tried) -> None:
    """It may fail in its first reset too, and be replaced."""
    received: list[TensorDictBase] = []
    envs = environments(fault, "reset", tmp_path / "struck")
    with pytest.raises(WorkerError, match=r"(?s)environment 1 .* in round 0, step 0"):
        run(told_policy(), envs, received)
    assert not received
    (tmp_path / "struck").unlink()
    with pytest.warns(RuntimeWarning, match="a worker is replaced"):
        run(told_policy(), envs, received, on_executor_failure="restart")
    assert_only_the_victim_differs(received, 0)
    tried("executor", fault, "first reset", "raised")
    tried("executor", fault, "first reset", "replaced")


def test_while_the_learner_learns(tried: Tried) -> None:
    """An executor dies while it rests: the learner is told when it next waits for it."""

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == 2:
            kill(collector, "executor 1")

    received: list[TensorDictBase] = []
    with pytest.raises(WorkerError, match=r"executor 1 .*was killed by SIGKILL.* between two"):
        run(told_policy(), sound_environments(), received, body)
    assert len(received) == 4  # round 3 was full
    assert_prefix(received)
    received = []
    with pytest.warns(RuntimeWarning, match="executor 1"):
        run(told_policy(), sound_environments(), received, body, on_executor_failure="restart")
    assert_only_the_victim_differs(received, 4 * T)
    for outcome in ("raised", "replaced"):
        tried("executor", "kill", "learner learns", outcome)


@pytest.mark.parametrize("fault", ["kill", "segv"])
def test_while_a_checkpoint_is_written(fault: str, tmp_path: Path, tried: Tried) -> None:
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
    assert len(received) == ROUNDS
    assert_goes_on(sound_environments(), states[0], received)
    for outcome in ("raised", "replaced"):
        tried("executor", fault, "checkpoint", outcome)


@pytest.mark.parametrize(
    ("fault", "at"),
    [(fault, "close") for fault in ("raise", "kill", "segv", "hang", "exit", "stop")]
    + [("hang", (ROUNDS + LAG) * T - 1)],
)
def test_during_shutdown(fault: str, at: str | int, tmp_path: Path, tried: Tried) -> None:
    """Whatever an environment does when it is closed, or just before: the run was whole."""
    marker = tmp_path / "struck"

    def finish(collector: HTSCollector) -> None:
        if at != "close":
            wait_until(marker.exists)  # in the last step of the round that is open
        collector.shutdown(timeout=2.0 if fault in ("hang", "stop") else None)

    received: list[TensorDictBase] = []
    seconds = run_until_shutdown(told_policy(), environments(fault, at, marker), received, finish)
    tried.took("shut down", fault, seconds)
    assert_whole(received)
    assert marker.exists()
    tried("executor", fault, "shutdown", "ended")


def test_dead_before_shutdown(tried: Tried) -> None:
    """An executor that nobody waits for any more has died."""

    def finish(collector: HTSCollector) -> None:
        kill(collector, "executor 1")
        collector.shutdown()

    received: list[TensorDictBase] = []
    seconds = run_until_shutdown(told_policy(), sound_environments(), received, finish)
    tried.took("shut down", "kill", seconds)
    assert_whole(received)
    tried("executor", "kill", "shutdown", "ended")


def test_gives_up(tried: Tried) -> None:
    """An environment that always fails is replaced so many times, and then raises."""
    envs = environments("raise", 2, Path(ALWAYS))
    received: list[TensorDictBase] = []
    with (
        pytest.warns(RuntimeWarning, match="a worker is replaced") as warned,
        pytest.raises(
            WorkerError,
            match=r"(?s)environment 1 failed .*the ball left.*It was not replaced: 2 had been "
            r"within 600 s",
        ),
    ):
        run(told_policy(), envs, received, on_executor_failure="restart", max_restarts=2)
    assert len([w for w in warned if w.category is RuntimeWarning]) == 2
    tried("executor", "raise", "always", "raised")


def test_fails_again_and_again(tried: Tried) -> None:
    """After every second step, and each time begins with another seed; a window is soon over."""
    envs = environments("raise", 2, Path(ALWAYS))
    received: list[TensorDictBase] = []
    options: dict[str, Any] = {"max_restarts": 1, "restart_window_s": 1e-9}
    with pytest.warns(RuntimeWarning, match="a worker is replaced"):
        collector = run(told_policy(), envs, received, on_executor_failure="restart", **options)
    lives = ROUNDS * T // 2
    assert collector.statistics().executor_restarts == lives - 1
    assert_only_the_victim_differs(received, 2)
    rows = torch.cat([batch[VICTIM] for batch in received])
    seeds = [environment_seed(SEED, VICTIM, 2 * life // T, life) for life in range(lives)]
    assert len(set(seeds)) == lives
    assert rows["observation"][::2, 0].tolist() == seeds
    tried("executor", "raise", "always", "replaced")


def replace_several(
    policy: Any, envs: list[Any], restarts: tuple[int, int], body: Body = lambda collector, _: None
) -> list[TensorDictBase]:
    """Run with two actors while so many workers fail; environment 0 notices nothing."""
    received: list[TensorDictBase] = []
    options: dict[str, Any] = {"on_executor_failure": "restart", "max_restarts": 8}
    with pytest.warns(RuntimeWarning, match="a worker is replaced"):
        collector = run(policy, envs, received, body, num_actors=2, **options)
    statistics = collector.statistics()
    assert (statistics.executor_restarts, statistics.actor_restarts) == restarts
    assert len(received) == ROUNDS
    for batch, expected in zip(received, undisturbed(), strict=True):
        assert_equal(batch[0], expected[0])
    return received


def test_several_at_once(tried: Tried) -> None:
    """Executors and both actors die between two rounds; their replacements, two rounds later."""

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ in (1, 3):
            for name in ("executor 2", "executor 1", "actor 0", "actor 1"):
                kill(collector, name)

    received = replace_several(told_policy(), sound_environments(), (4, 4), body)
    assert_prefix(received[:3])
    tried("all", "kill", "learner learns", "replaced")


def test_several_in_the_middle_of_a_round(tmp_path: Path, tried: Tried) -> None:
    """Two executors and an actor die in the same round; the third executor notices nothing."""
    envs = sound_environments()
    for env in (1, 2):
        envs[env] = partial(ToldEnv, "kill", 14, str(tmp_path / f"struck {env}"))
    replace_several(told_policy("kill", 2, str(tmp_path / "struck"), batch=1), envs, (2, 1))
    tried("all", "kill", "mid-round", "replaced")


def test_the_replacement_depends_on_nothing_else(tmp_path: Path, tried: Tried) -> None:
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
    tried("executor", "kill, raise", "twice alike", "replaced")
