"""Workloads and contenders of the benchmarks: the same environments, the same work."""

from __future__ import annotations

import pickle
import warnings
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import EchoEnv
from policies import categorical
from script_paths import BENCHMARKS  # noqa: F401  so that the scripts are found
from torchrl.collectors import Collector

from torchrl_hts import HTSCollector, UndelayedUpdateWarning
from torchrl_hts._reports.statistics import WorkerStatistics
from torchrl_hts._rounds.event_rings import Activity
from torchrl_hts.testing import digest

pytest.importorskip("ale_py")
pytest.importorskip("matplotlib")
import _machine
from _contenders import CONTENDERS, add_barrier, make_runner, per_step_s, serial
from _loops import Loop, make_gymnasium_loop, make_vector_loop
from _machine import INSTRUCTIONS, machine
from _workloads import TRAININGS, WORKLOADS, find_workload, make_agent, make_learn, policy_of

pytestmark = pytest.mark.usefixtures("warm_servers")


@pytest.mark.parametrize("name", [*WORKLOADS, "ALE/Breakout-v5", "3xcostless"])
def test_workloads_can_be_sent_to_processes(name: str) -> None:
    sent = pickle.loads(pickle.dumps(find_workload(name)))
    assert len(sent.factories(3)) == 3
    assert sent.slowest_step_s == find_workload(name).slowest_step_s


@pytest.mark.parametrize("name", ["3xcostless", "3xcartpole", "3xpong"])
def test_batches_are_of_the_same_environments(name: str) -> None:
    work = find_workload(name)
    one, batch = work.factories(1)[0](), work.units(6)[1]()
    assert len(work.units(6)) == 2
    assert batch.num_envs == 3
    assert batch.single_observation_space == one.observation_space
    assert batch.single_action_space == one.action_space
    batch.close()
    with pytest.raises(ValueError, match="4 environments are no batches of 3"):
        work.units(4)


def test_a_batch_that_costs_nothing_is_one_of_those_that_do() -> None:
    """With the ends of episodes where they are one by one."""
    work, how = find_workload("2xcostless"), TRAININGS["collect"]
    one = find_workload("costless")
    batches = []
    for each in (work, one):
        with CONTENDERS["hts"].make(each, how, 2, make_agent(each)) as collector:
            batches.append(torch.cat([batch.clone() for batch in islice(collector, 60)], 1))
    assert batches[0]["next", "done"].sum() == 2
    assert (batches[0] == batches[1]).all()


def test_a_loop_over_one_batch_of_all() -> None:
    work, how = find_workload("2xcostless"), TRAININGS["a2c5"]
    batch = next(iter(make_vector_loop(work, how, 6, make_agent(work))))
    assert batch.shape == (6, 5)
    with pytest.raises(
        ValueError, match="nothing makes a batch of an environment that only sleeps"
    ):
        find_workload("4xsleep")


class Reusing(gym.vector.VectorEnv[Any, Any, Any]):
    """Writes every outcome into the same arrays; a reward is the number of the step."""

    def __init__(self) -> None:
        self.outcome = (
            np.zeros((2, 64), np.float32), np.zeros(2, np.float32), np.zeros(2, bool),
            np.zeros(2, bool), {},
        )  # fmt: skip

    def reset(self, **_: Any) -> Any:
        return self.outcome[0], {}

    def step(self, actions: Any) -> Any:
        for array in self.outcome[:2]:
            array += 1
        return self.outcome


def test_a_loop_keeps_what_is_overwritten() -> None:
    """As PufferLib's vectorisation does it."""
    agent = make_agent(find_workload("costless"))
    batch = next(iter(Loop(Reusing(), agent, TRAININGS["a2c5"])))
    expected = torch.arange(1.0, 6.0).expand(2, 5)
    assert torch.equal(batch["next", "reward"].squeeze(-1), expected)
    assert torch.equal(batch["next", "observation"][..., 0], expected)


def test_the_machine_says_which_kernels_run() -> None:
    found = machine()
    assert found["torch_kernels"] == torch.backends.cpu.get_cpu_capability()
    assert set(found["vector_instructions"].split()) <= {*INSTRUCTIONS, "none"}
    assert found["numpy_blas_kernels"]


def test_with_a_barrier_everybody_waits_for_the_slowest(tmp_path: Path) -> None:
    make = partial(HTSCollector, [partial(EchoEnv, lengths=(5,))] * 4, categorical())
    batches = []
    for barrier in (False, True):
        collector = make(frames_per_batch=16, total_frames=96, timeline_events=1000, seed=0)
        with add_barrier(collector) if barrier else collector:
            batches.append([digest(batch) for batch in collector])
            timeline = collector.timeline(tmp_path / "all.json")
    assert batches[0] == batches[1]
    steps = timeline.of(Activity.STEP)
    rounds = timeline.rounds(steps)
    for round_ in range(1, 5):  # the first two are open from the start
        ended = steps[rounds == round_]["ended"].max()
        assert ended <= steps[rounds == round_ + 1]["began"].min()


def test_the_contender_that_records_a_timeline_does(tmp_path: Path) -> None:
    work, how = find_workload("cartpole"), TRAININGS["collect"]
    with CONTENDERS["hts-timeline"].make(work, how, 2, make_agent(work)) as collector:
        next(iter(collector))
        timeline = collector.timeline(tmp_path / "all.json")
    assert len(timeline.of(Activity.STEP)) >= 2 * how.sync_interval


def test_dqn_learns_from_a_buffer_of_what_is_gathered() -> None:
    """And nobody is told that its updates aren't delayed."""
    work, how = find_workload("cartpole"), TRAININGS["dqn5"]
    agent = make_agent(work)
    learn = make_learn(agent, how, 2, lag=1)
    assert learn is not None
    before = digest(agent.policy.parameters())
    with (
        warnings.catch_warnings(),
        CONTENDERS["hts"].make(work, how, 2, agent) as collector,
    ):
        warnings.simplefilter("error", UndelayedUpdateWarning)
        for batch in islice(collector, 4):
            learn(batch)
    assert digest(agent.policy.parameters()) != before


@pytest.mark.parametrize("training", ["a2c5", "ppo"])
def test_a_plain_loop_yields_what_a_collector_does(training: str) -> None:
    work, how = find_workload("cartpole"), TRAININGS[training]
    agent = make_agent(work)
    loop = make_gymnasium_loop(work, how, 2, agent)
    collector = Collector(
        serial(work.factories(2)),
        policy_of(agent, how),
        frames_per_batch=2 * how.sync_interval,
        total_frames=-1,
    )
    try:
        batches = iter(loop)
        batch, following, expected = next(batches), next(batches), next(iter(collector))
    finally:
        loop.shutdown()
        collector.shutdown()
    unused = ("collector", "done", "terminated", "truncated")  # at the root: of the step before
    expected = expected.exclude(*unused)
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    for key in batch.keys(True, True):
        assert (batch[key].shape, batch[key].dtype) == (expected[key].shape, expected[key].dtype)
    assert (batch["next", "observation"][:, :-1] == batch["observation"][:, 1:]).all()
    assert (batch["next", "observation"][:, -1] == following["observation"][:, 0]).all()
    logits = agent.logits.module(agent.trunk.module(batch["observation"]))
    log_prob = torch.distributions.Categorical(logits=logits).log_prob(batch["action"])
    torch.testing.assert_close(batch["action_log_prob"], log_prob)


def test_processor_time_is_of_the_steps_of_the_same_time() -> None:
    """An actor that was replaced begins anew."""

    def worker(cpu_s: float, events: int) -> WorkerStatistics:
        return WorkerStatistics(0.0, 0.0, 0.0, 0.0, 0.0, cpu_s, events, None)

    before = {"executor 0": worker(5.0, 100), "executor 1": worker(3.0, 10)}
    now = {"executor 0": worker(7.0, 130), "executor 1": worker(4.0, 30), "actor 1": worker(5.0, 9)}
    assert per_step_s(before, now) == {"executor": 3.0 / 50, "actor": 5.0 / 50}


def test_a_contender_says_what_it_has_used_after_the_warm_up() -> None:
    runner = make_runner("hts", "costless", "collect", 2)
    try:
        runner.advance()
        runner.begin()
        runner.advance()
        found = runner.facts()
    finally:
        runner.close()
    assert found["batch"] == [2, 20]
    assert all(found[f"{kind}_cpu_s"] >= 0 for kind in ("executors", "actors", "learner"))


def test_time_that_was_stolen_is_of_the_cores_that_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ["cpu  0 0 0 0 0 0 0 900 0 0", "cpu0 0 0 0 0 0 0 0 100 0 0"]
    lines += ["cpu1 0 0 0 0 0 0 0 200 0 0", "cpu10 0 0 0 0 0 0 0 600 0 0", "intr 1 2"]
    monkeypatch.setattr(Path, "read_text", lambda _: "\n".join(lines))
    monkeypatch.setattr(_machine.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(_machine.os, "sysconf", lambda _: 100)
    assert _machine.stolen_s() == 3.0
