"""How many executors there are by default: by what a trial of the first environment costs."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environments import EchoEnv
from hypothesis import given
from hypothesis import strategies as st
from policies import categorical

from torchrl_hts import HTSCollector
from torchrl_hts.limits import available_cores
from torchrl_hts.probing import EnvironmentTimes, StepCosts, executors_for, time_steps

CORES = available_cores()


class Play:
    """Random play of episodes of three steps; notes what was done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def reset(self) -> None:
        self.done.append("reset")

    def choose(self) -> None:
        self.done.append("choose")

    def step(self) -> bool:
        self.done.append("step")
        return self.done.count("step") % 3 == 0


def test_steps_and_resets_are_timed_apart() -> None:
    play = Play()
    times = time_steps(play, 0.0, least=6, warm_up=1)
    assert (len(times.steps), len(times.resets)) == (6, 2)
    turn = ["choose", "step"]
    assert play.done == ["reset", *3 * turn, "reset", *3 * turn, "reset", *turn]
    assert 0 <= times.cpu_share <= 1
    assert len(time_steps(Play(), 0.0, least=100, at_most_s=0.0).steps) == 1, "when time is over"
    assert len(time_steps(Play(), 0.0).steps) == 1


def test_a_core_that_was_shared_for_a_moment_doesnt_count() -> None:
    """One step of 20 was interrupted for much longer than all others took."""
    steps = np.full(20, 10e-6)
    steps[7] = 5e-3
    times = EnvironmentTimes(steps, np.empty(0), np.full(20, 9e-6))
    assert times.cpu_share == pytest.approx(0.9)
    times = EnvironmentTimes(np.full(1, 1e-2), np.empty(0), np.full(1, 1e-3))
    assert times.cpu_share == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("step_s", "cpu_share", "num_envs", "cores", "expected"),
    [
        (0.7e-3, 1.0, 16, 2, 2),  # computes: a core each
        (0.7e-3, 1.0, 16, 32, 16),
        (10e-3, 0.01, 16, 2, 16),  # sleeps: an environment each
        (10e-3, 0.01, 1000, 2, 200),  # ... or as many as keep the cores busy
        (10e-3, 0.25, 64, 2, 8),
        (0.0, 0.0, 4, 1, 4),
        (1e-6, 1.0, 16, 8, 1),  # costs nothing: one keeps up
        (6e-6, 1.0, 64, 8, 5),
        (1e-6, 1.0, 1, 8, 1),
    ],
)
def test_as_many_as_pay(
    step_s: float, cpu_share: float, num_envs: int, cores: int, expected: int
) -> None:
    assert executors_for(StepCosts(step_s, cpu_share), num_envs, cores) == expected


@given(st.floats(0, 100), st.floats(0, 1), st.integers(1, 2048), st.integers(1, 512))
def test_never_more_than_environments_nor_none(
    step_s: float, cpu_share: float, num_envs: int, cores: int
) -> None:
    assert 1 <= executors_for(StepCosts(step_s, cpu_share), num_envs, cores) <= num_envs


# Through the whole collector.


class SlowEnv(EchoEnv):
    """Waits 5 ms in each step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.005)
        return super().step(action)


class NotedEnv(EchoEnv):
    """Leaves a file when it is made, and another when it is closed; the first one made differs."""

    def __init__(self, folder: str, first_does: str = "nothing") -> None:
        super().__init__(lengths=(10,))
        made = [name for name in os.listdir(folder) if name.startswith("made")]
        self.folder, self.number = folder, len(made)
        self.does = "nothing" if made else first_does
        Path(folder, f"made {self.number} {os.getpid()}").touch()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.does == "raise":
            raise ValueError("this action is not allowed now")
        if self.does == "crash":
            os.abort()
        if self.does == "wait":
            time.sleep(3600)
        return super().step(action)

    def close(self) -> None:
        Path(self.folder, f"closed {self.number}").touch()
        super().close()


def slow_torchrl_env() -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(SlowEnv(), categorical_action_encoding=True)


def collect(factories: list[Any], **options: Any) -> tuple[int, torch.Tensor]:
    """The number of executors, and the batches."""
    frames = 2 * len(factories)
    with HTSCollector(
        factories,
        categorical(),
        frames_per_batch=frames,
        total_frames=3 * frames,
        seed=0,
        **options,
    ) as collector:
        data = torch.cat([batch.exclude("collector") for batch in collector])
        executors = sum(name.startswith("executor") for name in collector.worker_pids())
    return executors, data


def equal(one: Any, other: Any) -> bool:
    return all(
        torch.equal(value, other[key])
        for key, value in one.items(include_nested=True, leaves_only=True)
    )


@pytest.mark.usefixtures("nothing_left")
class TestCollector:
    """What is chosen, and that nothing else comes of it."""

    def test_one_each_for_environments_that_wait(self) -> None:
        assert collect([SlowEnv] * 5)[0] == 5

    def test_one_for_environments_that_cost_nothing(self) -> None:
        assert collect([EchoEnv] * 4)[0] == 1

    def test_who_gives_a_number_gets_it(self, tmp_path: Path) -> None:
        factories = [partial(NotedEnv, str(tmp_path))] * 3
        assert collect(factories, num_executors=2)[0] == 2
        assert len(list(tmp_path.glob("made*"))) == 3, "nothing was tried out"

    def test_the_choice_changes_no_bit(self) -> None:
        _, chosen = collect([SlowEnv] * 3)
        _, given = collect([SlowEnv] * 3, num_executors=1)
        assert equal(chosen, given)

    def test_what_was_tried_out_is_closed_and_gone(self, tmp_path: Path) -> None:
        collect([partial(NotedEnv, str(tmp_path))] * 2)
        made = sorted(path.name.split()[1:] for path in tmp_path.glob("made*"))
        assert [number for number, _ in made] == ["0", "1", "2"]
        assert made[0][1] != made[1][1], "it lived in a process of its own"
        assert (tmp_path / "closed 0").exists()

    def test_a_single_environment_is_not_tried_out(self, tmp_path: Path) -> None:
        assert collect([partial(NotedEnv, str(tmp_path))])[0] == 1
        assert len(list(tmp_path.glob("made*"))) == 1

    @pytest.mark.parametrize("does", ["raise", "crash", "wait"])
    def test_a_trial_that_fails_does_no_harm(self, does: str, tmp_path: Path) -> None:
        """Environments that random play is too much for are still trained on, on every core."""
        executors, _ = collect([partial(NotedEnv, str(tmp_path), does)] * 3)
        assert executors == min(CORES, 3)

    def test_torchrl_environments(self) -> None:
        assert collect([slow_torchrl_env] * 3)[0] == 3
