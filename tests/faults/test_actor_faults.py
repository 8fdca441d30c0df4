"""Actors that fail in any way, in any phase: what is said, and that a replacement leaves no trace.

Where the policy fails is told by the number of updates that its parameters have seen, so the moment
is exact. An actor that is idle is killed by the loop itself.
"""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import wait_until
from rounds import (
    LAG,
    ROUNDS,
    SEED,
    N,
    T,
    Tried,
    assert_prefix,
    assert_whole,
    kill,
    run,
    run_until_shutdown,
    sound_environments,
    timeouts_s,
)
from tensordict import TensorDictBase
from told import EPISODE, LAST_WORDS, NAP_S, ToldEnv
from told_policy import CALIBRATION, START_UP, learn, told_policy

from torchrl_hts import Failure, HTSCollector, WorkerError
from torchrl_hts._learner.learner import environment_seed

pytestmark = pytest.mark.timeout(120)

FAULTS = {
    "raise": (Failure.RAISED, "the policy failed in round {round}, for .*ValueError: the ball"),
    "memory": (Failure.OUT_OF_MEMORY, "the policy failed for want of memory in round {round}"),
    "nan": (Failure.INVALID, "NaN in 'logits' for environment.*parameters and inputs are finite"),
    "segv": (Failure.CRASHED, "was killed by SIGSEGV in round {round}.*Fatal Python error: Segm"),
    "kill": (Failure.KILLED, r"was killed by SIGKILL \(.*for want of memory\) in round {round}"),
    "exit": (Failure.EXITED, "ended with exit code 7 in round {round}, for environment"),
    "hang": (Failure.HUNG, "made no progress for 4 s.* in round {round}.*File .*in strike"),
}
FINAL = (Failure.RAISED, Failure.INVALID, Failure.OUT_OF_MEMORY)  # it would fail so again
# Name: the updates that the parameters have seen, the round, and the batch of an actor there.
PHASES = {"first round": (0, 0, 0), "begin of a round": (2, 3, 0), "mid-round": (2, 3, 1)}
CASES = [(fault, phase) for fault in FAULTS for phase in PHASES]


@pytest.mark.parametrize("mode", ["raise", "restart"])
@pytest.mark.parametrize(("fault", "phase"), CASES)
def test_policy(fault: str, phase: str, mode: str, tmp_path: Path, tried: Tried) -> None:
    """A replaced actor leaves no trace in any batch; a policy that raises is not tried again."""
    failure, said = FAULTS[fault]
    updates, round_, batch = PHASES[phase]
    marker = tmp_path / "struck"
    policy = told_policy(fault, updates, str(marker), batch)
    received: list[TensorDictBase] = []
    options: dict[str, Any] = {"num_actors": 2}
    options |= {"on_executor_failure": mode, "timeout_s": timeouts_s("actor", fault)}
    if mode == "restart" and failure not in FINAL:
        with pytest.warns(RuntimeWarning, match="(?s)a worker is replaced: actor"):
            collector = run(policy, sound_environments(), received, **options)
        tried.went_on(fault, marker)
        assert collector.statistics().actor_restarts == 1
        assert_whole(received)
        tried("actor", fault, phase, "replaced")
        return
    said = said.replace("{round}", str(round_))
    with pytest.raises(WorkerError, match=f"(?s){said}") as e:
        run(policy, sound_environments(), received, **options)
    tried.told(fault, marker)
    assert (e.value.failure, e.value.worker_kind, e.value.round) == (failure, "actor", round_)
    assert (e.value.step, e.value.stepped) == (None, ())
    assert set(e.value.env_indices) <= set(range(N))
    assert e.value.env_indices
    assert LAST_WORDS in e.value.stderr
    assert_prefix(received, round_)
    tried("actor", fault, phase, "raised")


class Waiting(ToldEnv):
    """Waits at a step until something bad has happened elsewhere."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.steps == self.at:
            wait_until(Path(self.marker).exists)
        return super().step(action)


@pytest.mark.parametrize("fault", ["raise", "nan", "kill"])
def test_the_environments_of_the_pass_are_named(fault: str, tmp_path: Path, tried: Tried) -> None:
    """And no other; the last one is still in the round before, where it waits for the failure."""
    updates, round_, _ = PHASES["begin of a round"]
    marker = tmp_path / "struck"
    envs = sound_environments()
    envs[-1] = partial(Waiting, "none", round_ * T - 2, str(marker))
    with pytest.raises(WorkerError) as e:
        run(told_policy(fault, updates, str(marker)), envs, [])
    # Rows that fill the batch up are of earlier steps.
    rows = torch.tensor(json.loads(marker.read_text()), dtype=torch.float64)
    seeds = rows[rows[:, 1] * EPISODE + rows[:, 2] == round_ * T, 0].tolist()
    named = [environment_seed(SEED, env, 0) for env in e.value.env_indices]
    assert named
    assert sorted(named) == sorted(seeds)
    assert (e.value.round, e.value.step, e.value.stepped) == (round_, None, ())
    tried("actor", fault, "begin of a round", "raised")


@pytest.mark.parametrize("mode", ["raise", "restart"])
@pytest.mark.parametrize(
    ("fault", "phase", "said"),
    [
        ("raise", "start-up", "ValueError: the ball left"),
        ("kill", "start-up", "actor 0 .*was killed by SIGKILL"),
        ("segv", "start-up", "actor 0 .*was killed by SIGSEGV"),
        ("raise", "calibration", "ValueError: the ball left"),
        ("kill", "calibration", "actor 0 .* was killed by SIGKILL .* while it calibrated"),
        ("segv", "calibration", "was killed by SIGSEGV while it calibrated"),
    ],
)
def test_before_the_first_round(
    fault: str, phase: str, said: str, mode: str, tmp_path: Path, tried: Tried
) -> None:
    """An actor that fails before it has done anything is not replaced."""
    marker = tmp_path / "struck"
    at = {"start-up": START_UP, "calibration": CALIBRATION}[phase]
    policy = told_policy(fault, at, str(marker))
    with pytest.raises(WorkerError, match=f"(?s){said}.*{LAST_WORDS}") as e:
        run(policy, sound_environments(), [], on_executor_failure=mode)
    tried.told(fault, marker)
    assert e.value.worker_kind == "actor"
    tried("actor", fault, phase, "raised")


def test_a_long_calibration_is_no_hang(tmp_path: Path, tried: Tried) -> None:
    """What calibrates shows no progress: the time doesn't count."""
    marker = tmp_path / "struck"
    policy = told_policy("nap", CALIBRATION, str(marker))
    options: dict[str, Any] = {"frames_per_batch": N * T, "timeout_s": {"actor": NAP_S / 4}}
    with HTSCollector(sound_environments(), policy, **options):
        assert marker.exists()
    tried("actor", "nap", "calibration", "ended")


def test_while_the_learner_learns(tried: Tried) -> None:
    """An actor dies while it rests: the learner is told when it next waits, or not at all."""

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == 2:
            kill(collector, "actor 0")

    received: list[TensorDictBase] = []
    with pytest.raises(WorkerError, match=r"actor 0 .*was killed by SIGKILL.* between two"):
        run(told_policy(), sound_environments(), received, body)
    assert len(received) == 4  # round 3 was full
    assert_prefix(received)
    received = []
    with pytest.warns(RuntimeWarning, match="actor 0"):
        run(told_policy(), sound_environments(), received, body, on_executor_failure="restart")
    assert_whole(received)
    for outcome in ("raised", "replaced"):
        tried("actor", "kill", "learner learns", outcome)


def test_before_a_checkpoint_is_written(tried: Tried) -> None:
    """An actor that is dead when a state is asked for; its replacement changes no bit of it."""
    states: list[Any] = []

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == 2:
            kill(collector, "actor 0")
            states.append(deepcopy(collector.state_dict()))

    received: list[TensorDictBase] = []
    with pytest.raises(WorkerError, match=r"actor 0 .*was killed by SIGKILL"):
        run(told_policy(), sound_environments(), received, body)
    # A state takes no actor: it may be there before the death is heard of, a batch later then.
    assert len(received) == 3 + len(states)
    assert_prefix(received)
    received, states = [], []
    with pytest.warns(RuntimeWarning, match="actor 0"):
        run(told_policy(), sound_environments(), received, body, on_executor_failure="restart")
    assert_whole(received)
    resumed: list[TensorDictBase] = received[:3]
    policy = told_policy()
    with HTSCollector(
        sound_environments(), policy, frames_per_batch=N * T, total_frames=N * T * ROUNDS, lag=LAG
    ) as collector:
        collector.load_state_dict(states[0])
        learn(policy)  # the update that the state was taken before
        for batch in collector:
            resumed.append(batch.clone())
            learn(policy)
    assert_whole(resumed)
    for outcome in ("raised", "replaced"):
        tried("actor", "kill", "checkpoint", outcome)


@pytest.mark.parametrize("fault", ["hang", "stop"])
def test_during_shutdown(fault: str, tmp_path: Path, tried: Tried) -> None:
    """An actor that never returns, in the round that is open when the run ends."""
    marker = tmp_path / "struck"

    def finish(collector: HTSCollector) -> None:
        wait_until(marker.exists)
        collector.shutdown(timeout=0.5)

    received: list[TensorDictBase] = []
    policy = told_policy(fault, ROUNDS - 1, str(marker))
    seconds = run_until_shutdown(policy, sound_environments(), received, finish)
    tried.took("shut down", fault, seconds)
    assert_whole(received)
    tried("actor", fault, "shutdown", "ended")


def test_dead_before_shutdown(tried: Tried) -> None:
    """An actor that nobody waits for any more has died."""

    def finish(collector: HTSCollector) -> None:
        kill(collector, "actor 0")
        collector.shutdown()

    received: list[TensorDictBase] = []
    seconds = run_until_shutdown(told_policy(), sound_environments(), received, finish)
    tried.took("shut down", "kill", seconds)
    assert_whole(received)
    tried("actor", "kill", "shutdown", "ended")
