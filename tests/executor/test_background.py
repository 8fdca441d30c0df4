"""Environments that play in the background: begun when their actions come, and the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from background_environments import BackgroundEcho, HangingEcho, TellingEcho
from environments import EchoEnv
from policies import categorical
from probe import take_for_hung_after
from processes import wait_until
from tensordict import TensorDictBase

from torchrl_hts import HTSCollector, WorkerError
from torchrl_hts._executor.background import BackgroundSteps
from torchrl_hts._rounds.event_rings import Activity
from torchrl_hts._rounds.exchange import Inbox

pytestmark = pytest.mark.usefixtures("nothing_left")


def gather(factories: list[Any], num_executors: int, **options: Any) -> TensorDictBase:
    """Three rounds, seeds given again, and two more."""
    with HTSCollector(
        factories,
        categorical(),
        frames_per_batch=12 * len(factories),
        num_executors=num_executors,
        num_actors=1,
        seed=5,
        **options,
    ) as collector:
        batches = iter(collector)
        gathered = [next(batches).clone() for _ in range(3)]
        collector.set_seed(7)
        gathered += [next(batches).clone() for _ in range(2)]
    return torch.stack(gathered)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    "factories",
    [
        [BackgroundEcho] * 6,
        [BackgroundEcho, partial(EchoEnv, (3, 5)), partial(BackgroundEcho, direct=3)] * 2,
        [TellingEcho] * 6,
        [BackgroundEcho, partial(EchoEnv, (3, 5)), partial(TellingEcho, direct=3)] * 2,
    ],
    ids=["all", "beside others", "all tell", "tell beside others"],
)
def test_i7_steps_in_the_background_change_no_bit(factories: list[Any], lag: int) -> None:
    expected = gather([partial(EchoEnv, (3, 5))] * len(factories), 1, lag=lag)
    for num_executors in (1, 3, 6):
        assert (gather(factories, num_executors, lag=lag) == expected).all()


class Uneven(BackgroundEcho):
    """One is slow: its first step is over when the other has made all steps of a round."""

    tells = True
    slow: ClassVar[list[Callable[[], None]]] = []
    num_fast = 0

    def __init__(self, is_slow: bool, steps: int) -> None:
        super().__init__()
        self.is_slow, self.round = is_slow, steps

    def tell_when_over(self, tell: Callable[[], None]) -> None:
        Uneven.num_fast += not self.is_slow
        if self.is_slow:
            self.slow.append(tell)
        else:
            tell()
        while self.slow and Uneven.num_fast >= self.round:
            self.slow.pop()()

    def step(self, action: Any) -> Any:
        assert not self.is_slow or Uneven.num_fast >= self.round, "others were held up"
        return super().step(action)


def test_a_slow_environment_holds_up_no_other_of_its_executor() -> None:
    factories = [partial(Uneven, is_slow, 12) for is_slow in (True, False)]
    with HTSCollector(
        factories, categorical(), frames_per_batch=24, total_frames=48, num_executors=1
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 48


ENDS = pytest.mark.parametrize("ends", [BackgroundEcho, TellingEcho], ids=["waited for", "told"])


@ENDS
@pytest.mark.parametrize(
    ("dies", "said", "envs"),
    [
        (False, "environment 1 failed in round 0, step 3.*the ball is lost", (1,)),
        (True, "exit code 7 while environment 1 was stepped in round 0, step 3", (0, 1, 2)),
    ],
)
def test_a_failure_at_the_beginning_of_a_step_is_told(
    dies: bool, said: str, envs: tuple[int, ...], ends: type[BackgroundEcho]
) -> None:
    factories = [ends, partial(ends, fails_at=4, dies=dies), ends]
    with (
        HTSCollector(factories, categorical(), frames_per_batch=30, num_executors=1) as collector,
        pytest.raises(WorkerError, match=f"(?s){said}") as error,
    ):
        next(iter(collector))
    assert (error.value.env_indices, error.value.round, error.value.step) == (envs, 0, 3)


@ENDS
@pytest.mark.parametrize("fails_at", [13, 20])
def test_a_failure_is_not_mixed_up_with_steps_that_have_begun_beside_it(
    fails_at: int, ends: type[BackgroundEcho]
) -> None:
    """What they were about to yield is never seen: their executor, and they, begin anew."""
    factories = [ends, partial(ends, fails_at=fails_at), ends]
    with HTSCollector(
        factories,
        categorical(),
        frames_per_batch=36,
        num_executors=1,
        on_executor_failure="restart",
        max_restarts=50,
    ) as collector:
        batches = iter(collector)
        with pytest.warns(RuntimeWarning, match="the ball is lost"):
            gathered = torch.cat([next(batches).clone() for _ in range(4)], 1)
    for row in gathered:
        ids = row["collector", "traj_ids"]
        goes_on = ids[1:] == ids[:-1]
        done = row["next", "done"].flatten()[:-1]
        assert not goes_on[done].any()
        # What was broken off is truncated, unless the learner had the end of its batch already.
        unmarked = ~done & ~goes_on
        assert ((unmarked.nonzero() + 1) % 12 == 0).all()
        before, after = row["next", "observation"][:-1], row["observation"][1:]
        assert torch.equal(before[goes_on], after[goes_on])
        assert (after[~goes_on][:, 2] == 0).all()


def test_a_step_that_hangs_is_named_also_while_its_executor_comes_to_rest(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with HTSCollector(
        [TellingEcho, partial(HangingEcho, begun), TellingEcho],
        categorical(),
        frames_per_batch=36,
        num_executors=1,
        timeout_s=300,
    ) as collector:
        next(iter(collector))
        wait_until(begun.exists)
        take_for_hung_after(collector, 5)
        with pytest.raises(WorkerError, match="while environment 1 was stepped in round 1, step 2"):
            collector.set_seed(3)


def test_nobody_is_left_to_send_actions() -> None:
    """As when the main process is killed: what is under way is not waited for."""
    inbox = Inbox.create()
    steps = BackgroundSteps(Inbox(inbox.read_fd, -1))
    told: list[Callable[[], None]] = []
    environment: Any = SimpleNamespace(tell_when_over=told.append)
    steps.watch(3, environment, 17)
    inbox.post([1])
    assert (len(steps), steps.oldest, [*steps.read()], [*steps.over()]) == (1, 3, [1], [])
    told[0]()
    assert ([*steps.read()], [*steps.over()], len(steps)) == ([], [(3, 17)], 0)
    os.close(inbox.write_fd)
    steps.watch(3, environment, 18)
    with pytest.raises(EOFError, match="nobody is left"):
        steps.read()
    told[1]()
    steps.close()
    os.close(inbox.read_fd)


def test_steps_do_not_overlap_in_the_timeline(tmp_path: Path) -> None:
    """A step counts from the end of the one before it in the same executor."""
    factories = [BackgroundEcho, partial(EchoEnv, (3, 5)), partial(TellingEcho, direct=3)]
    options = {"total_frames": 180, "num_executors": 1, "timeline_events": 1000}
    with HTSCollector(factories, categorical(), frames_per_batch=36, **options) as collector:
        for _ in collector:
            pass
        events = collector.timeline(tmp_path / "trace.json").events["executor 0"]
        counted = sum(collector.statistics().step_times.values())
    assert (events["began"] <= events["ended"]).all()
    assert (events["began"][1:] >= events["ended"][:-1]).all()
    assert counted == (events["activity"] == Activity.STEP).sum() >= 180
