"""Batches of environments, each a unit of the schedule: the data are those of single ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from collectors import start
from environments import EchoEnv, FaultyEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from policies import categorical
from tensordict import TensorDictBase

from torchrl_hts import HTSCollector, WorkerError
from torchrl_hts._rounds.event_rings import Activity

pytestmark = [pytest.mark.usefixtures("collectors_end"), pytest.mark.timeout(120)]

ONE = partial(EchoEnv, (2, 5, 3))
ENDLESS = partial(EchoEnv, (10**9,))
MODES = list(AutoresetMode)
K, ALPHA = 6, 4


def batch_of(
    k: int, make: Callable[[], Any] = ONE, mode: AutoresetMode = AutoresetMode.NEXT_STEP
) -> Callable[[], Any]:
    """No function of this module, so that executors need not import it, and torch with it."""
    return partial(SyncVectorEnv, [make] * k, autoreset_mode=mode)


def collect(envs: list[Any], rounds: int = 4, **kwargs: Any) -> TensorDictBase:
    """All that is collected, ``[K, rounds * alpha]``."""
    with start(
        envs, frames_per_batch=K * ALPHA, total_frames=K * ALPHA * rounds, **kwargs
    ) as collector:
        return torch.cat(list(collector), 1)


@pytest.fixture(scope="module")
def one_by_one() -> TensorDictBase:
    return collect([ONE] * K)


class TestTheSameData:
    @pytest.mark.parametrize("mode", MODES)
    def test_as_one_batch(self, mode: AutoresetMode, one_by_one: TensorDictBase) -> None:
        found = collect([batch_of(K, mode=mode)])
        assert (found == one_by_one).all()
        assert found["next", "done"].sum() == 4 * K

    @pytest.mark.parametrize(
        ("num_executors", "num_actors"), [(None, None), (1, 1), (2, 1), (4, 3)]
    )
    def test_as_batches_of_different_sizes_beside_single_ones(
        self,
        num_executors: int | None,
        num_actors: int | None,
        one_by_one: TensorDictBase,
    ) -> None:
        """I7: whoever steps and answers them."""
        envs = [ONE, batch_of(3, mode=MODES[1]), ONE, batch_of(1)]
        found = collect(envs, num_executors=num_executors, num_actors=num_actors)
        assert (found == one_by_one).all()

    def test_with_episodes_cut_off(self) -> None:
        expected = collect([ENDLESS] * K, max_frames_per_traj=3)
        for mode in MODES:
            found = collect([batch_of(2), batch_of(4, ENDLESS, mode)][1:] + [ENDLESS] * 2,
                            max_frames_per_traj=3)  # fmt: skip
            assert (found == expected).all()
        assert expected["next", "truncated"].sum() == K * 5

    def test_of_gymnasiums_own_environments(self) -> None:
        policy = categorical(4, 2)
        make = partial(gym.make, "CartPole-v1")
        expected = collect([make] * K, policy=policy)
        for mode in MODES:
            kwargs = {"autoreset_mode": mode}
            made = partial(gym.make_vec, "CartPole-v1", K, "sync", vector_kwargs=kwargs)
            assert (collect([made], policy=policy) == expected).all()


class TestCounts:
    def test_frames_are_those_of_environments_and_time_that_of_batches(
        self, tmp_path: Path
    ) -> None:
        with start(
            [batch_of(4), batch_of(2)], frames_per_batch=K * ALPHA, total_frames=2 * K * ALPHA,
            timeline_events=1000, num_executors=5, lag=0,
        ) as collector:  # fmt: skip
            assert (collector.num_envs, collector.sync_interval) == (K, ALPHA)
            assert collector.num_executors == 2, "no more than batches"
            batches = list(collector)
            found = collector.statistics()
            timeline = collector.timeline(tmp_path / "timeline.json")
        assert [batch.shape for batch in batches] == [(K, ALPHA)] * 2
        assert found.frames == 2 * K * ALPHA
        steps = [found.workers[f"executor {index}"].events for index in range(2)]
        assert steps == [4 * 2 * ALPHA, 2 * 2 * ALPHA]
        assert sum(found.step_times.values()) == 2 * 2 * ALPHA
        assert found.episodes == sum(int(batch["next", "done"].sum()) for batch in batches)
        told = timeline.of(Activity.STEP)
        assert sorted(told["env"].tolist()) == [0] * 2 * ALPHA + [4] * 2 * ALPHA

    def test_what_does_not_divide_is_rounded_up(self) -> None:
        with pytest.warns(UserWarning, match="frames_per_batch=20 is not divisible by the 6 env"):
            collector = start([batch_of(4), batch_of(2)], frames_per_batch=20)
        assert collector.frames_per_batch == 24


class TestFaults:
    def test_an_environment_that_raises(self) -> None:
        bad = partial(SyncVectorEnv, [ENDLESS, partial(FaultyEnv, "raise"), ENDLESS])
        collector = start([ENDLESS, bad], frames_per_batch=16)
        expected = (
            r"(?s)environments 1 to 3 failed in round 0, step 2, .*the ball left the universe"
        )
        with pytest.raises(WorkerError, match=expected) as e:
            next(iter(collector))
        assert e.value.env_indices == (1, 2, 3)

    def test_an_executor_that_is_killed_is_replaced(self) -> None:
        """Its batch begins new episodes, cut off where they were; the others go on as they do."""
        envs = [batch_of(2, ENDLESS), batch_of(4, ENDLESS)]
        expected = collect(envs)
        with start(
            envs, num_executors=2, on_executor_failure="restart", frames_per_batch=K * ALPHA
        ) as collector:
            batches = iter(collector)
            first = next(batches)
            os.kill(collector.worker_pids()["executor 1"], signal.SIGKILL)
            with pytest.warns(RuntimeWarning, match=r"environment\(s\) 2, 3, 4, 5"):
                others = [next(batches) for _ in range(3)]
        found = torch.cat([first, *others], 1)
        assert (found[:2] == expected[:2]).all()
        cut = found["next", "truncated"].squeeze(-1)
        assert cut[:2].sum() == 0
        assert (cut[2:].sum(1) <= 1).all()
        seeds = found["observation"][:, :, 0]
        assert (seeds[2:, -1] != expected["observation"][2:, -1, 0]).all()
        assert len(seeds[:, -1].unique()) == K


def test_seeds_given_again_are_given_to_each_environment() -> None:
    """As to single ones."""

    def run(envs: list[Any]) -> TensorDictBase:
        with start(envs, frames_per_batch=K * ALPHA) as collector:
            batches = iter(collector)
            found = [next(batches).clone() for _ in range(2)]
            collector.set_seed(5)
            found += [next(batches).clone() for _ in range(3)]
        return torch.cat(found, 1)

    expected = run([ONE] * K)
    assert len(expected["observation"][0, :, 0].unique()) > 1, "or no seed was given"
    assert (run([batch_of(4), batch_of(2, mode=MODES[1])]) == expected).all()


class TestResume:
    def run_and_resume(self, envs: list[Any], resumed: list[Any]) -> bool:
        """Whether a run that was saved and loaded has the same data."""
        kwargs: dict[str, Any] = {"frames_per_batch": K * ALPHA, "total_frames": 5 * K * ALPHA}
        expected = torch.cat(list(start(envs, **kwargs)), 1)
        with start(envs, **kwargs) as collector:
            batches = iter(collector)
            some = [next(batches) for _ in range(2)]
            state = collector.state_dict()
        with start(resumed, **kwargs) as collector:
            collector.load_state_dict(state)
            some += list(collector)
        return bool((torch.cat(some, 1) == expected).all())

    @pytest.mark.parametrize("mode", MODES)
    def test_goes_on_bit_for_bit(self, mode: AutoresetMode) -> None:
        envs = [batch_of(3, mode=mode), ONE, batch_of(2, mode=mode)]
        assert self.run_and_resume(envs, envs)

    def test_what_can_not_be_saved_begins_new_episodes_and_says_so(self) -> None:
        def recorded() -> Any:
            return gym.wrappers.vector.RecordEpisodeStatistics(
                batch_of(K, mode=AutoresetMode.SAME_STEP)()
            )

        with pytest.warns(UserWarning, match=r"begin new episodes.*environments 0 to 5: RecordE"):
            assert not self.run_and_resume([recorded], [recorded])

    def test_a_state_of_other_batches_is_refused(self) -> None:
        with start([batch_of(K)], frames_per_batch=K * ALPHA) as collector:
            next(iter(collector))
            state = collector.state_dict()
        collector = start([ONE] * K, frames_per_batch=K * ALPHA)
        with pytest.raises(ValueError, match="has 1 states, and there are 6 environments"):
            collector.load_state_dict(state)


def test_environments_that_are_not_alike_are_told_by_what_was_given() -> None:
    with pytest.raises(ValueError, match="environment 1 differs from environment 0 in its action"):
        start([batch_of(2), partial(EchoEnv, (3,), action_space=gym.spaces.Discrete(4))])


def test_one_that_is_refused_says_what_to_make_instead() -> None:
    make = partial(gym.make_vec, "CartPole-v1", 2, "vector_entry_point")
    with pytest.raises(WorkerError, match=r"make_vec\(\.\.\., vectorization_mode='sync'\)"):
        HTSCollector([make], categorical(4, 2), frames_per_batch=8)
