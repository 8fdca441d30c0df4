"""A learner that raises, in any phase: its own error comes out, and nothing of the run remains."""

from __future__ import annotations

from pathlib import Path

import pytest
from rounds import Tried, assert_prefix, environments, run, sound_environments
from tensordict import TensorDictBase
from told_policy import told_policy

from torchrl_hts import HTSCollector, WorkerError

pytestmark = pytest.mark.timeout(120)


class LearnerError(Exception):
    """What the user's code raises."""


@pytest.mark.parametrize("error", [LearnerError, KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.parametrize(("phase", "at"), [("first round", 0), ("learner learns", 2)])
def test_in_the_loop(error: type[BaseException], phase: str, at: int, tried: Tried) -> None:
    """Whether the next round is under way or done: the error is the user's own, unchanged."""
    raised = error("its own")

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == at:
            raise raised

    received: list[TensorDictBase] = []
    with pytest.raises(error) as e:
        run(told_policy(), sound_environments(), received, body)
    assert e.value is raised
    assert len(received) == at + 1
    assert_prefix(received)
    tried("learner", error.__name__, phase, "raised")


def test_because_a_checkpoint_fails(tmp_path: Path, tried: Tried) -> None:
    """An executor dies while its state is asked for: told as both errors."""
    marker = tmp_path / "struck"

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == 2:
            try:
                collector.state_dict()
            except WorkerError as failure:
                raise LearnerError("no checkpoint") from failure

    received: list[TensorDictBase] = []
    with pytest.raises(LearnerError) as e:
        run(told_policy(), environments("kill", "save", marker), received, body)
    assert "executor 1" in str(e.value.__cause__)
    tried.told("kill", marker)
    assert len(received) == 3
    assert_prefix(received)
    tried("learner", "LearnerError", "checkpoint", "raised")


def test_and_an_environment_hangs_in_the_end(tmp_path: Path, tried: Tried) -> None:
    """The learner's error is not hidden by what happens while the workers are ended."""
    marker = tmp_path / "struck"

    def body(collector: HTSCollector, round_: int) -> None:
        if round_ == 2:
            try:
                raise LearnerError("its own")
            finally:
                collector.shutdown(timeout=2.0)

    received: list[TensorDictBase] = []
    with (
        pytest.warns(RuntimeWarning, match="close"),
        pytest.raises(LearnerError, match="its own"),
    ):
        run(told_policy(), environments("hang", "close", marker), received, body)
    assert marker.exists()
    assert len(received) == 3
    assert_prefix(received)
    tried("learner", "LearnerError", "shutdown", "raised")
