"""The evaluator's process: a queue that outlives it, what goes wrong, and its end."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import EchoEnv, FaultyEnv, GatedEnv
from evaluating import RANDOM, PayingEnv, cart_pole, one, pays, saved, set_value
from policies import categorical
from probe import let_it_finish
from processes import Script, alive, group_of, wait_until, wait_until_gone

from torchrl_hts._evaluation.evaluator import Evaluation, Evaluator
from torchrl_hts.errors import Failure, ResourceError, WorkerError

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A named pipe that GatedEnv waits at."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def gated(gate: Path) -> Callable[[], Any]:
    """Environments that pay the parameter, but wait at the gate before their second step."""
    return functools.partial(_PaysAtGate, str(gate))


class _PaysAtGate(GatedEnv):
    def __init__(self, gate: str) -> None:
        super().__init__(gate, at=1)
        self.action_space = gym.spaces.Box(-100, 100, (1,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, *rest = super().step(action)
        return observation, float(action[0]), *rest  # type: ignore[return-value]


AT_GATE: dict[str, Any] = {"num_episodes": 1, "max_frames_per_episode": 2}


def open_gate(gate: Path) -> None:
    """Let the evaluation go on that waits there, or will."""
    with open(gate, "wb") as pipe:
        pipe.write(b"x")


def next_result(evaluator: Evaluator) -> Evaluation:
    """The next evaluation, by polling."""
    found: list[Evaluation] = []
    wait_until(lambda: bool(found.extend(evaluator.poll()) or found))
    (evaluation,) = found
    return evaluation


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_and_ends_nothing(copied: Callable[[object], object]) -> None:
    with Evaluator(PayingEnv, pays(), num_episodes=1) as evaluator:
        with pytest.raises(TypeError, match="Evaluator can't be copied or pickled: its workers"):
            copied(evaluator)
        gc.collect()  # what a half-made copy held
        evaluator.submit(0)
        assert len(evaluator.wait()) == 1


def test_what_is_no_state_is_refused() -> None:
    with Evaluator(PayingEnv, pays(), num_episodes=1) as evaluator:
        evaluator.submit(0)
        evaluator.wait()
        for state, said in ((None, "a mapping, got NoneType"), ({}, "lacks best, pending")):
            with pytest.raises((TypeError, ValueError), match=f"^state_dict .*{said}"):
                evaluator.load_state_dict(state)  # type: ignore[arg-type]


def test_submissions_queue_up_with_their_own_parameters(gate: Path) -> None:
    policy = pays(ballast=10_000_000)  # 40 MB: far more than a socket takes
    with Evaluator(gated(gate), policy, **AT_GATE) as evaluator:
        for step in (1, 2, 3):
            set_value(policy, 10.0 * step)
            evaluator.submit(step)  # none of them waits: the gate is shut
        set_value(policy, -1.0)
        assert evaluator.poll() == []
        results = []
        for _ in range(2):
            open_gate(gate)
            results.append(next_result(evaluator))
        assert evaluator.poll() == []
        open_gate(gate)
        results += evaluator.wait()
        assert evaluator.wait() == []
    assert [(result.step, result.returns) for result in results] == [
        (1, (20.0,)),
        (2, (40.0,)),
        (3, (60.0,)),
    ]


def test_training_goes_first() -> None:
    with Evaluator(PayingEnv, pays(), num_episodes=1) as evaluator:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, evaluator.pid) == min(own + 10, 19)


# Resuming.


def test_what_is_pending_is_evaluated_again_after_a_resume(gate: Path) -> None:
    policy = pays()
    with Evaluator(gated(gate), policy, **AT_GATE) as evaluator:
        for step in (1, 2, 3):
            set_value(policy, 10.0 * step)
            evaluator.submit(step)
        open_gate(gate)
        returned = next_result(evaluator)
        state = saved(evaluator.state_dict())  # 2 is being played, 3 waits
    assert [pending["step"] for pending in state["pending"]] == [2, 3]
    assert state["best"] == returned.max == 20.0
    with Evaluator(gated(gate), pays(-1.0), **AT_GATE) as evaluator:
        evaluator.load_state_dict(state)
        results = []
        for _ in range(2):
            open_gate(gate)
            results.append(next_result(evaluator))
        assert not evaluator.state_dict()["pending"]
    assert [(result.step, result.returns) for result in results] == [(2, (40.0,)), (3, (60.0,))]


def test_what_was_not_returned_is_pending_even_if_it_is_finished() -> None:
    policy = categorical(num_actions=2)
    options: dict[str, Any] = {"num_episodes": 3, "exploration_type": RANDOM}
    with Evaluator(cart_pole, policy, **options) as evaluator:
        evaluator.submit(1)
        let_it_finish(evaluator)
        state = saved(evaluator.state_dict())
        expected = evaluator.poll()
    assert len(expected) == 1
    with Evaluator(cart_pole, categorical(num_actions=2, seed=5), **options) as evaluator:
        evaluator.load_state_dict(state)
        assert evaluator.wait() == expected


def test_only_a_fitting_state_is_loaded() -> None:
    with Evaluator(PayingEnv, pays(), num_episodes=1) as evaluator:
        evaluator.submit(0)
        state = evaluator.state_dict()
        with pytest.raises(ValueError, match="not been returned"):
            evaluator.load_state_dict(state)
    with (
        Evaluator(PayingEnv, pays(ballast=3), num_episodes=1) as evaluator,
        pytest.raises(ValueError, match="another policy"),
    ):
        evaluator.load_state_dict(state)


SCRIPT = """
import json, os, sys, torch
from evaluating import RANDOM, cart_pole
from policies import categorical
from torchrl_hts import Evaluator
policy = categorical(num_actions=2)
options = dict(num_episodes=3, exploration_type=RANDOM)
evaluator = Evaluator(cart_pole, policy, **options)
for step in (1, 2):
    evaluator.submit(step)
torch.save(evaluator.state_dict(), sys.argv[1])
print(json.dumps(evaluator.pid), flush=True)
evaluator.submit(3)
while True:
    evaluator.wait()
    evaluator.submit(4)
"""


def test_a_killed_run_leaves_no_process_and_its_checkpoint_gives_the_same(tmp_path: Path) -> None:
    policy = categorical(num_actions=2)
    options: dict[str, Any] = {"num_episodes": 3, "exploration_type": RANDOM}
    expected = [one(cart_pole, policy, step, **options) for step in (1, 2)]
    checkpoint = tmp_path / "checkpoint.pt"
    with Script(tmp_path / "run.py", SCRIPT, str(checkpoint)) as script:
        pid = script.receive()
        assert alive(pid)
        os.kill(script.process.pid, signal.SIGKILL)
        wait_until_gone([pid])
    with Evaluator(cart_pole, categorical(num_actions=2, seed=1), **options) as evaluator:
        evaluator.load_state_dict(torch.load(checkpoint, weights_only=True))
        assert evaluator.wait() == expected


# What goes wrong.


def test_a_killed_process_is_said_by_every_method(gate: Path) -> None:
    with Evaluator(gated(gate), pays(), **AT_GATE) as evaluator:
        evaluator.submit(4)
        os.kill(evaluator.pid, signal.SIGKILL)
        for call in (evaluator.wait, evaluator.poll, lambda: evaluator.submit(5)):
            with pytest.raises(WorkerError, match=r"SIGKILL .* in the .* at step 4") as e:
                call()
        assert e.value.worker == "evaluator"
        # What was asked for is not lost: another evaluator can play it.
        assert [pending["step"] for pending in evaluator.state_dict()["pending"]] == [4, 5]


def test_a_process_killed_at_rest_is_noticed() -> None:
    with Evaluator(PayingEnv, pays(), num_episodes=1) as evaluator:
        os.kill(evaluator.pid, signal.SIGKILL)
        wait_until(lambda: not alive(evaluator.pid))
        with pytest.raises(WorkerError, match=r"was killed by SIGKILL .*while it waited for work"):
            evaluator.poll()


@pytest.mark.parametrize(
    ("fault", "failure", "said"),
    [
        ("raise", Failure.RAISED, r"failed in the .* 9; .*in step.*the ball left the universe"),
        ("shape", Failure.INVALID, r"failed in the evaluation at step 9:.*of shape \(2,\)"),
        ("quit", Failure.RAISED, r"failed in the .* at step 9; .*SystemExit: the engine gave up"),
        ("reset", Failure.RAISED, r"failed in the evaluation at step 9; .*cannot reset"),
        ("exit", Failure.EXITED, r"ended with exit code 7 in the evaluation at step 9"),
        ("fork and die", Failure.KILLED, r"was killed by SIGKILL .*in the evaluation at step 9"),
    ],
)
def test_a_failing_environment_is_an_error_that_says_how(
    fault: str, failure: Failure, said: str
) -> None:
    make_env = functools.partial(FaultyEnv, fault)
    with Evaluator(make_env, categorical(), num_episodes=2) as evaluator:
        pid = evaluator.pid
        with pytest.raises(WorkerError, match=f"(?s){said}") as e:  # noqa: PT012  either may
            evaluator.submit(9)
            evaluator.wait()
        assert e.value.failure is failure
        assert (e.value.exit_signal == signal.SIGKILL) is (failure is Failure.KILLED)
    wait_until(lambda: not group_of(pid))  # what the environment has started ends with it


@pytest.mark.parametrize("within", ["send_object", "receive_object"])
def test_one_that_is_interrupted_within_a_message_is_ended(
    within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for an answer that was lost, and what was asked for is still known."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Evaluator(PayingEnv, pays(), num_episodes=1) as evaluator:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            patch.setattr(f"torchrl_hts._evaluation.player_process.{within}", interrupt)
            evaluator.submit(3)
            evaluator.wait()
        with pytest.raises(RuntimeError, match="has been shut down"):
            evaluator.wait()
        assert [pending["step"] for pending in evaluator.state_dict()["pending"]] == [3]


def test_an_environment_that_cannot_be_made_is_an_error_at_once() -> None:
    with pytest.raises(WorkerError, match=r"(?s)while it made the environments.*no engine here"):
        Evaluator(functools.partial(FaultyEnv, "init"), categorical())


def test_a_process_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ResourceError("too few processes")

    monkeypatch.setattr("torchrl_hts._evaluation.player_process.acquire_server", refuse)
    with pytest.raises(ResourceError, match="too few processes"):
        Evaluator(EchoEnv, categorical())


def test_shutdown_ends_an_evaluation_at_once(gate: Path) -> None:
    evaluator = Evaluator(gated(gate), pays(), **AT_GATE)
    evaluator.submit(0)
    pid = evaluator.pid
    began = time.monotonic()
    evaluator.shutdown()
    assert time.monotonic() - began < 4
    assert not alive(pid)
    evaluator.shutdown()
    for call in (evaluator.wait, evaluator.poll, lambda: evaluator.submit(1)):
        with pytest.raises(RuntimeError, match="has been shut down"):
            call()


def test_an_idle_process_closes_its_environments(tmp_path: Path) -> None:
    class Closing(PayingEnv):
        def close(self) -> None:
            with open(tmp_path / "closed", "a") as file:
                file.write("x")

    one(Closing, pays(), num_episodes=3)
    assert (tmp_path / "closed").read_text() == "xxx"


def test_every_environment_is_closed_though_one_cannot_be(tmp_path: Path) -> None:
    class Failing(PayingEnv):
        def close(self) -> None:
            with open(tmp_path / "closed", "a") as file:
                file.write("x")
            raise ConnectionError("the simulator is gone")

    one(Failing, pays(), num_episodes=3)
    assert (tmp_path / "closed").read_text() == "xxx"


def test_a_forgotten_evaluator_is_ended(gate: Path) -> None:
    evaluator = Evaluator(gated(gate), pays(), **AT_GATE)
    evaluator.submit(0)
    pid = evaluator.pid
    del evaluator
    wait_until_gone([pid])
