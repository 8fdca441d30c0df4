"""What environments and policies cost, and that a collector chooses its processes by that."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import time
import warnings
from copy import deepcopy
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import EchoEnv
from policies import categorical, marked, needs_rows
from torchrl.envs.utils import ExplorationType

from torchrl_hts import HTSCollector, WorkerError
from torchrl_hts._executor.background_env import BackgroundEnv
from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._planning import worker_counts
from torchrl_hts._planning.costs import PassCosts, StepCosts, TeamSize, team_for
from torchrl_hts._planning.pass_times import median_cpu_time
from torchrl_hts._planning.planner import Planner
from torchrl_hts._planning.probe import EnvironmentTimes, time_steps
from torchrl_hts._processes.limits import available_cores
from torchrl_hts.collector import startup

CORES = ceil(available_cores())


def test_dear_passes_are_not_repeated() -> None:
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        sum(range(1000))

    assert median_cpu_time(call, 0.0) > 0
    assert len(calls) == 8, "three to warm up"
    calls.clear()
    assert median_cpu_time(call, 1.0, at_most_s=1e-9) > 0
    assert len(calls) == 1


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


def measured(
    steps: list[float],
    cpu: list[float],
    disturbed: list[bool],
    resets: list[float],
    resets_disturbed: tuple[bool, ...] = (False,),
) -> StepCosts:
    flags = np.array(disturbed), np.array(resets_disturbed)
    return EnvironmentTimes(
        np.array(steps), np.array(resets), np.array(cpu), np.zeros(len(resets)), *flags
    ).costs()


def test_a_step_that_lost_its_core_to_another_program_doesnt_count() -> None:
    costs = measured([1e-5, 5e-3, 1e-5], [1e-5, 1e-5, 1e-5], [False, True, False], [])
    assert costs == StepCosts(pytest.approx(1e-5), 1.0)  # type: ignore[arg-type]
    costs = measured([4e-3, 4e-3], [2e-3, 2e-3], [True, True], [])
    assert costs == StepCosts(4e-3, 0.5), "all were: they are all there is"


def test_a_wait_in_few_steps_counts() -> None:
    costs = measured([1e-5] * 9 + [1e-2], [1e-5] * 10, [False] * 10, [])
    assert costs.step_s == pytest.approx(1e-3, rel=0.05)
    assert costs.cpu_share < 0.02


def test_resets_count() -> None:
    costs = measured([1e-5] * 10, [1e-5] * 10, [False] * 10, [0.05])
    assert costs.step_s == pytest.approx(5e-3, rel=0.05)


def test_a_reset_that_lost_its_core_counts_as_the_others() -> None:
    resets = [1e-5, 5e-3]
    costs = measured([1e-5] * 10, [1e-5] * 10, [False] * 10, resets, (False, True))
    assert costs.step_s == pytest.approx(1.2e-5)
    costs = measured([1e-5] * 10, [1e-5] * 10, [False] * 10, resets, (True, True))
    assert costs.step_s == pytest.approx(1e-5 + 5.01e-3 / 10), "all were: they are all there is"


def test_plans_are_kept_for_environments_that_are_alike() -> None:
    env, other = EchoEnv(), EchoEnv(action_space=gym.spaces.Discrete(4))
    one, two = (GymDescription(e.observation_space, e.action_space) for e in (env, other))

    def planner(on_cpu: bool) -> Planner:
        return Planner(
            pickle.dumps(marked()),
            2,
            on_cpu=on_cpu,
            exploration_type=ExplorationType.RANDOM,
            max_frames_per_traj=0,
            compact_obs=False,
        )

    plans = planner(on_cpu=True)
    job = plans.pass_job(one)
    assert job is not None
    assert pickle.loads(job.examples).batch_size == (2,)
    assert plans.plan(deepcopy(one)) is plans.plan(one)
    assert plans.plan(two) is not plans.plan(one)
    assert planner(on_cpu=False).pass_job(one) is None, "the cores are left to the executors"


# Through the whole collector.


class SlowEnv(EchoEnv):
    """Waits 5 ms in each step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.005)
        return super().step(action)


class SlowElsewhere(SlowEnv, BackgroundEnv):
    """Says that its steps may wait side by side."""

    tells = True


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
        if self.does == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().step(action)

    def close(self) -> None:
        Path(self.folder, f"closed {self.number}").touch()
        super().close()


def slow_torchrl_env() -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(SlowEnv(), categorical_action_encoding=True)


def disguised(folder: str) -> Any:
    return __import__("torchrl.envs").envs.GymWrapper(
        NotedEnv(folder), categorical_action_encoding=True
    )


def collect(factories: list[Any], policy: Any = None, **options: Any) -> tuple[int, torch.Tensor]:
    """The number of executors, and the batches."""
    frames = 2 * len(factories)
    with HTSCollector(
        factories,
        policy or categorical(),
        frames_per_batch=frames,
        total_frames=3 * frames,
        seed=0,
        **options,
    ) as made:
        data = torch.cat([batch.exclude("collector") for batch in made])
        executors = sum(name.startswith("executor") for name in made.worker_pids())
        assert executors == made.num_executors
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

    def test_one_for_environments_that_wait_elsewhere(self) -> None:
        assert collect([SlowElsewhere] * 5)[0] == 1

    def test_one_for_environments_that_cost_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nothing = StepCosts(step_s=1e-6, cpu_share=1.0)  # whatever the machine makes of it
        choose = partial(team_for, nothing)
        monkeypatch.setattr(
            worker_counts, "team_for", lambda _, *rest, **args: choose(*rest, **args)
        )
        assert collect([EchoEnv] * 4)[0] == 1

    def test_what_the_policy_costs_is_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[PassCosts | None] = []

        def choose(
            costs: StepCosts, num_envs: int, cores: int, time_passes: Any, **_: Any
        ) -> TeamSize:
            found.append(time_passes())
            return TeamSize(2, 1)

        monkeypatch.setattr(worker_counts, "team_for", choose)
        for num_cells in ((16,), (512,) * 20):
            assert collect([EchoEnv] * 4, policy=categorical(num_cells=num_cells))[0] == 2
        small, large = found
        assert small is not None
        assert large is not None
        assert small.rows == (1, 4)
        assert 0 < 5 * small.time(4) < large.time(4) < 1

    def test_as_many_actors_as_keep_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On many cores, with a policy that a step of the environment is nothing beside."""

        def choose(
            costs: StepCosts, num_envs: int, cores: int, time_passes: Any, **options: Any
        ) -> TeamSize:
            nothing, dear = StepCosts(1e-6, 1.0), PassCosts((1, 8), (1.0, 8.0))
            return team_for(nothing, num_envs, cores, lambda: dear, **options)

        monkeypatch.setattr(startup, "available_cores", lambda: 5.0)
        monkeypatch.setattr(worker_counts, "team_for", choose)
        actors = []
        for options in ({}, {"actor_threads": 2}, {"num_actors": 1}, {"num_executors": 1}):
            with HTSCollector(
                [EchoEnv] * 8,
                categorical(),
                frames_per_batch=16,
                total_frames=16,
                seed=0,
                **options,
            ) as made:
                pids = made.worker_pids()
                assert sum("actor" in name for name in pids) == made.num_actors
                assert made.num_executors == 1
                actors.append(made.num_actors)
        assert actors == [4, 2, 1, 1]

    def test_a_policy_that_can_not_be_timed_fails_where_it_acts(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(startup, "available_cores", lambda: 4.0)
        with pytest.raises(WorkerError, match="too few rows") as raised:
            collect([EchoEnv] * 4, policy=needs_rows(10))
        assert raised.value.worker == "actor 0"
        assert capfd.readouterr().err == ""

    def test_who_gives_a_number_gets_it(self, tmp_path: Path) -> None:
        factories = [partial(NotedEnv, str(tmp_path))] * 3
        assert collect(factories, num_executors=2)[0] == 2
        assert len(list(tmp_path.glob("made*"))) == 3, "nothing was tried out"

    @pytest.mark.parametrize(
        "chosen", [None, TeamSize(1, 1), TeamSize(1, 3), TeamSize(2, 1), TeamSize(3, 2)]
    )
    def test_the_choice_changes_no_bit(
        self, chosen: TeamSize | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither for what waits, nor where the policy's time decides."""
        env = SlowEnv if chosen is None else EchoEnv
        if chosen is not None:
            monkeypatch.setattr(worker_counts, "team_for", lambda *_, **__: chosen)
        executors, found = collect([env] * 3)
        assert executors == (3 if chosen is None else chosen.executors)
        given = 1 if executors > 1 else 3
        assert equal(found, collect([env] * 3, num_executors=given, num_actors=1)[1])

    def test_what_was_tried_out_is_closed_and_gone(self, tmp_path: Path) -> None:
        collect([partial(NotedEnv, str(tmp_path))] * 2)
        made = sorted(path.name.split()[1:] for path in tmp_path.glob("made*"))
        assert [number for number, _ in made] == ["0", "1", "2"]
        assert made[0][1] != made[1][1], "it lived in a process of its own"
        assert (tmp_path / "closed 0").exists()

    def test_a_single_environment_is_not_tried_out(self, tmp_path: Path) -> None:
        assert collect([partial(NotedEnv, str(tmp_path))])[0] == 1
        assert len(list(tmp_path.glob("made*"))) == 1

    @pytest.mark.parametrize("does", ["raise", "crash", "wait", "hang"])
    def test_a_probe_that_fails_does_no_harm(
        self, does: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Environments that random play is too much for are still trained on, on every core."""
        timeout = {"timeout_s": {"executor": 5.0}} if does == "hang" else {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            executors, _ = collect([partial(NotedEnv, str(tmp_path), does)] * 9, **timeout)
        said = [str(w.message) for w in caught if "was given up" in str(w.message)]
        assert len(said) == (does == "hang")
        assert all("trial of an environment took longer than 5 s" in text for text in said)
        assert executors == (9 if does == "wait" else min(CORES, 9))
        assert len(list(tmp_path.glob("made*"))) == 10
        if does in ("raise", "wait"):
            assert (tmp_path / "closed 0").exists()
        assert capfd.readouterr().err == ""

    def test_as_many_as_there_are_descriptors_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_counts, "team_for", lambda *_, **__: TeamSize(5, 1))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = len(os.listdir("/dev/fd")) + 16 + 2 + 4 * 3 + 2
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            assert collect([EchoEnv] * 5)[0] == 3
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_actors_leave_descriptors_to_the_executors(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_counts, "team_for", lambda *_, **__: TeamSize(2, 200))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = len(os.listdir("/dev/fd")) + 16 + 4 * 2 + 2 * 3 + 6
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            with HTSCollector([EchoEnv] * 4, categorical(), frames_per_batch=8, seed=0) as made:
                assert made.num_executors == 2
                assert 1 <= made.num_actors <= 6
                assert "num_executors=2, num_actors=" in repr(made)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_torchrl_environments(self) -> None:
        assert collect([slow_torchrl_env] * 3)[0] == 3

    def test_an_environment_that_turns_out_to_need_torch(self, tmp_path: Path) -> None:
        """The probe finds out that they need torch; what it has made is closed before it ends."""
        assert collect([partial(disguised, str(tmp_path))] * 2)[0] in (1, 2)
        assert len(list(tmp_path.glob("made*"))) == 4, "two probes, two environments"
        assert {"closed 0", "closed 1"} <= {path.name for path in tmp_path.iterdir()}
