"""Rounds, versions and what a batch holds (I1 to I5), through the whole collector."""

from __future__ import annotations

import gc
import operator
import os
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from environments import GatedEnv, echo
from policies import categorical, marked
from probe import finished_steps
from torchrl.collectors import BaseCollector

from torchrl_hts import HTSCollector

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("num_executors", [1, 3])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_i1_every_row_is_one_environment_in_time_order(lag: int, num_executors: int) -> None:
    """Also in the first round: no transition is lost, doubled or mixed with another's action."""
    envs = [echo(5), echo(3, 4), echo(2)]
    with HTSCollector(
        envs,
        categorical(),
        frames_per_batch=3 * 4,
        total_frames=3 * 4 * 5,
        lag=lag,
        num_executors=num_executors,
        seed=1,
    ) as collector:
        data = torch.cat(list(collector), dim=1)
    observation, after = data["observation"], data["next", "observation"]
    assert data.shape == (3, 20)
    # Each row has the seed of its own environment, and they differ.
    assert (observation[..., 0] == observation[:, :1, 0]).all()
    assert len(observation[:, 0, 0].unique()) == 3
    # The action in a row is the one that its environment was stepped with.
    assert (after[..., 3] == data["action"]).all()
    done = data["next", "done"].squeeze(-1)
    for env, lengths in enumerate([(5,), (3, 4), (2,)]):
        episode = t = 0
        for step in range(20):
            assert observation[env, step, 1:3].tolist() == [episode, t]
            assert after[env, step, 1:3].tolist() == [episode, t + 1]  # the true last one, too
            assert data["next", "reward"][env, step].item() == t + 1
            t += 1
            over = t == lengths[episode % len(lengths)]
            assert done[env, step] == over == data["next", "terminated"][env, step]
            if over:
                episode, t = episode + 1, 0
    assert not data["next", "truncated"].any()
    assert not data["done"].any()


def test_trajectory_ids_are_unique_and_new_after_each_end() -> None:
    envs = [echo(5), echo(3, 4), echo(2)]
    with HTSCollector(envs, categorical(), frames_per_batch=12, total_frames=60) as collector:
        data = torch.cat(list(collector), dim=1)
    episodes = data["observation"][..., :2].flatten(0, 1)
    ids = data["collector", "traj_ids"].flatten()
    assert ids.dtype == torch.int64
    pairs = {(*episode, i) for episode, i in zip(episodes.tolist(), ids.tolist(), strict=True)}
    assert len(pairs) == len(ids.unique()) == len(episodes.unique(dim=0))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_i2_i3_round_j_acts_with_theta_j(lag: int) -> None:
    """The learner adds 1 per update; buffers travel with the parameters."""
    policy = marked()
    with HTSCollector(
        [echo()] * 2, policy, frames_per_batch=8, total_frames=8 * 6, lag=lag
    ) as collector:
        for j, batch in enumerate(collector):
            assert (batch["mark"] == max(0, j - lag)).all(), "I3: the lag is constant"
            assert (batch["count"] == max(0, j - lag)).all()
            assert batch["policy_version"].dtype == torch.int64
            assert (batch["policy_version"] == j).all()
            with torch.no_grad():
                policy.module.mark += 1
                policy.module.count += 1
    assert j == 5


def test_i2_an_optimizer_step_never_shows_in_a_running_round() -> None:
    """The stock multi-process collectors share the live parameters with their workers."""
    policy = marked()
    with HTSCollector([echo()], policy, frames_per_batch=50, total_frames=50 * 4) as collector:
        for j, batch in enumerate(collector):
            assert batch["mark"].unique().tolist() == [max(0, j - 1)]
            for k in range(20):  # steps of the optimizer while the next round runs
                policy.module.mark.data.fill_(100 + k)
            policy.module.mark.data.fill_(j + 1)


def test_i4_no_barrier(tmp_path: Path) -> None:
    """While one environment is held in round 1, the other finishes round 2."""
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    envs = [partial(GatedEnv, gate, at=5), partial(GatedEnv, gate, at=-1)]
    with HTSCollector(
        envs, marked(), frames_per_batch=2 * 4, total_frames=8 * 4, lag=1, num_executors=2
    ) as collector:
        batches = iter(collector)
        next(batches)
        waiting = threading.Thread(target=next, args=(batches,))
        waiting.start()  # says that update 0 is done, and waits for round 1
        steps = finished_steps(collector)
        while (steps[0] < 5 or steps[1] < 12) and waiting.is_alive():  # or times out
            waiting.join(0.01)
        assert (steps[0], steps[1]) == (5, 12)
        Path(gate).write_bytes(b"!")
        waiting.join()
        assert steps[0] >= 8


def test_i5_a_batch_is_not_overwritten(tmp_path: Path) -> None:
    with HTSCollector([echo(7)] * 2, categorical(), frames_per_batch=8, total_frames=80) as data:
        kept = [(batch, batch.clone()) for batch in data]
    for batch, copy in kept:
        assert (batch == copy).all()


def test_return_same_td_hands_out_the_slot() -> None:
    with HTSCollector(
        [echo(7)] * 2,
        categorical(),
        frames_per_batch=8,
        total_frames=8 * 6,
        return_same_td=True,
        lag=1,
        seed=0,
    ) as collector:
        pointers, batches = [], []
        for batch in collector:
            assert "advantage" not in batch.keys(), "a key of an earlier batch turned up"
            batch["advantage"] = torch.zeros(batch.shape)
            pointers.append(batch["observation"].data_ptr())
            batches.append(batch.clone())
    assert len(set(pointers)) == 2  # lag + 1 slots
    with HTSCollector(
        [echo(7)] * 2, categorical(), frames_per_batch=8, total_frames=8 * 6, seed=0
    ) as collector:
        for same, copied in zip(batches, collector, strict=True):
            assert (same.exclude("advantage") == copied).all()


def test_a_dropped_iterator_loses_nothing() -> None:
    policy = marked()
    with HTSCollector([echo()] * 2, policy, frames_per_batch=8, total_frames=8 * 5) as collector:
        versions = []
        for batch in collector:
            versions.append(batch["policy_version"][0, 0].item())
            break
        for batch in collector:
            versions.append(batch["policy_version"][0, 0].item())
    assert versions == [0, 1, 2, 3, 4]


def test_next_and_length_and_stats() -> None:
    collector = HTSCollector([echo()] * 2, marked(), frames_per_batch=8, total_frames=16)
    assert isinstance(collector, BaseCollector)
    assert len(collector) == 2
    assert collector.next().shape == (2, 4)
    assert collector.stats() == {
        "frames": 8, "batches": 1, "total_frames": 16, "completed": False,
        "requested_frames_per_batch": 8, "policy_version": 1,
    }  # fmt: skip
    assert collector.next().shape == (2, 4)
    assert collector.next() is None
    statistics = collector.statistics()
    assert (statistics.frames, statistics.rounds) == (16, 2)
    assert statistics.mean_actor_batch_size > 0
    assert collector.statistics() == statistics, "the clock stops with the run"
    collector.shutdown()


def test_frames_follow_torchrls_rule() -> None:
    """Neither number divides: both are rounded up, with a warning."""
    with pytest.warns(UserWarning, match="divisible") as warnings:
        collector = HTSCollector([echo()] * 3, marked(), frames_per_batch=10, total_frames=25)
    assert len(warnings) == 2
    with collector:
        assert [tuple(batch.shape) for batch in collector] == [(3, 4), (3, 4), (3, 4)]


def test_an_endless_collector_goes_on() -> None:
    with HTSCollector([echo()], marked(), frames_per_batch=4) as collector:
        batches = iter(collector)
        for _ in range(20):
            batch = next(batches)
        assert batch["policy_version"].unique().item() == 19
        with pytest.raises(TypeError, match="length"):
            len(collector)
        assert collector, "without a length, but there"
        assert operator.length_hint(collector, 7) == 7, "as list() and tqdm ask"


class TestSeeds:
    """What is random comes from one seed."""

    @staticmethod
    def batches(collector: HTSCollector, count: int = 3) -> torch.Tensor:
        iterator = iter(collector)
        return torch.cat(
            [
                torch.cat(
                    [next(iterator)[key].double().flatten() for key in ("observation", "action")]
                )
                for _ in range(count)
            ]
        )

    def test_constructor_and_set_seed_agree(self) -> None:
        envs, policy = [echo(5)] * 2, categorical()
        with HTSCollector(envs, policy, frames_per_batch=8, seed=3) as collector:
            expected = self.batches(collector)
        with HTSCollector(envs, policy, frames_per_batch=8, seed=4) as collector:
            assert not torch.equal(self.batches(collector), expected)
        with HTSCollector(envs, policy, frames_per_batch=8, seed=4) as collector:
            assert collector.set_seed(3) == 5
            assert torch.equal(self.batches(collector), expected)

    def test_torchs_seed_decides_if_none_is_given(self) -> None:
        seen = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            with HTSCollector([echo()] * 2, categorical(), frames_per_batch=8) as collector:
                seen.append(self.batches(collector))
        assert torch.equal(seen[0], seen[1])
        assert not torch.equal(seen[0], seen[2])

    def test_static_seed_gives_all_environments_the_same(self) -> None:
        with HTSCollector([echo()] * 3, marked(), frames_per_batch=6) as collector:
            assert collector.set_seed(3, static_seed=True) == 3
            assert len(next(iter(collector))["observation"][..., 0].unique()) == 1

    def test_set_seed_in_the_middle_resets_and_keeps_versions(self) -> None:
        policy = marked()
        with HTSCollector([echo(50)] * 2, policy, frames_per_batch=8, lag=1) as collector:
            iterator = iter(collector)
            for j in range(3):
                batch = next(iterator)
                policy.module.mark.data.fill_(j + 1)
            collector.set_seed(9)
            batch = next(iterator)
            assert batch["policy_version"].unique().item() == 3
            assert batch["mark"].unique().item() == 2  # theta_3: update 1 is in it, update 2 not
            assert batch["observation"][:, 0, 1:3].tolist() == [[0, 0], [0, 0]]
            assert next(iterator)["mark"].unique().item() == 3


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_state_dict_goes_on_with_the_same_versions(lag: int) -> None:
    def train(collector: HTSCollector, policy: torch.nn.Module, until: int) -> list[float]:
        marks = []
        for batch in collector:
            marks.append(batch["mark"].unique().item())
            policy.module.mark.data += 1
            if batch["policy_version"][0, 0] == until:
                break
        return marks

    policy = marked()
    with HTSCollector([echo()] * 2, policy, frames_per_batch=8, lag=lag, seed=0) as collector:
        first = train(collector, policy, until=3)
        state = collector.state_dict()
    resumed = marked()
    with HTSCollector([echo()] * 2, resumed, frames_per_batch=8, lag=lag, seed=1) as collector:
        with pytest.raises(ValueError, match="lacks"):
            collector.load_state_dict({"frames": 3})
        collector.load_state_dict(state)
        assert collector.seed == 0
        first += train(collector, resumed, until=6)
        assert collector.stats()["frames"] == 7 * 8
    assert first == [max(0, j - lag) for j in range(7)]


def test_collectors_one_after_the_other_leak_no_descriptors() -> None:
    def run() -> int:
        with HTSCollector([echo()] * 2, marked(), frames_per_batch=8, total_frames=8) as collector:
            list(collector)
        del collector
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    run()  # what is opened once stays open
    assert run() == run()


def test_a_state_of_another_shape_is_refused() -> None:
    with HTSCollector([echo()], marked(), frames_per_batch=4, lag=1) as collector:
        state = collector.state_dict()
    with HTSCollector([echo()], marked(), frames_per_batch=4, lag=2) as collector:
        with pytest.raises(ValueError, match="lag=1; this one has lag=2"):
            collector.load_state_dict(state)
        assert next(iter(collector)).shape == (1, 4)
