"""Games of EnvPool in a process of their own, and several in one pool: they play the same."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from football_installed import need
from probe import pool_pid, shares_its_pool
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor

from torchrl_hts import HTSCollector
from torchrl_hts.envs import make_football, make_football_batch
from torchrl_hts.envs.football import FootballEnv

SCENARIO = "academy_3_vs_1_with_keeper"

pytestmark = pytest.mark.usefixtures("nothing_left")


def make(count: int) -> list[FootballEnv]:
    need("envpool")
    envs = [make_football(SCENARIO, engine="envpool") for _ in range(count)]
    return [env for env in envs if isinstance(env, FootballEnv)]


def begin(env: FootballEnv, trace: list[Any]) -> None:
    observation, info = env.reset()
    trace.append((observation.tobytes(), str(info)))


def play(env: FootballEnv, action: int, trace: list[Any]) -> None:
    """One step, and at the end of an episode, or now and then within it, the next one."""
    observation, *outcome, info = env.step(action)
    trace.append((observation.tobytes(), *outcome, str(info)))
    if outcome[1] or outcome[2] or len(trace) % 50 == 0:
        begin(env, trace)


def test_games_of_one_pool_play_as_they_do_alone() -> None:
    """Whatever the order in which their steps begin and are waited for."""
    count, steps = 3, 150
    actions = np.random.default_rng(0).integers(19, size=(count, steps))
    alone: list[list[Any]] = [[] for _ in range(count)]
    for index, env in enumerate(make(count)):
        alone[index].append(env.reset(seed=index)[0].tobytes())
        for action in actions[index]:
            play(env, int(action), alone[index])
        env.close()

    envs = make(count)
    for index, env in enumerate(envs):
        env.begin_reset(index)
    together: list[list[Any]] = [[] for _ in range(count)]
    for index, env in enumerate(envs):
        together[index].append(env.reset(seed=index)[0].tobytes())
        assert shares_its_pool(env)
    order = random.Random(0)
    left = [list(map(int, each)) for each in actions]
    begun: list[int] = []
    while any(left) or begun:
        idle = [index for index in range(count) if left[index] and index not in begun]
        if idle and (not begun or order.random() < 0.6):
            index = order.choice(idle)
            if order.random() < 0.9:  # else the step isn't begun beforehand
                assert envs[index].begin_step(left[index][0])
            begun.append(index)
        else:
            index = begun.pop(order.randrange(len(begun)))
            play(envs[index], left[index].pop(0), together[index])
    assert together == alone
    for env in envs:
        env.close()


def test_a_game_that_begins_otherwise_than_announced() -> None:
    """It plays what it is told to play; so does one that is told a second time."""
    (env,) = make(1)
    _, expected = env.reset(seed=5)
    env.close()
    first, second = make(2)
    for env in (first, second):
        env.begin_reset(0)
    assert first.reset(seed=5)[1] == expected
    second.reset(seed=0)
    second.begin_reset(5)
    assert second.reset(seed=5)[1] == expected
    assert not second.begin_step(0)
    second.step(0)
    for env in (first, second):
        env.close()


def test_a_new_seed_takes_a_process_that_ends_with_the_next() -> None:
    """Since EnvPool never gives a game's memory back."""
    need("envpool")
    env = make_football(engine="envpool")
    _, first = env.reset(seed=0)
    pids = []
    for seed in (1, 0):
        _, info = env.reset(seed=seed)
        pids.append(pool_pid(env))
        assert (info == first) == (seed == 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="EnvPool football game died"):
        env.step(0)
    env.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[1], 0)


def test_a_batch_is_one_pool_whose_games_can_begin_by_themselves() -> None:
    need("envpool")
    games = make_football_batch(SCENARIO, 3)
    seeds = [4, 5, 4]
    _, infos = games.reset(seed=seeds)
    assert all(shares_its_pool(env) for env in games.envs)
    engine_seeds = infos["engine_seed"].tolist()
    assert len(set(engine_seeds)) == 2
    games.reset(options={"reset_mask": np.array([True, False, False])})
    *_, infos = games.step(np.array([0, 0, 0]))
    assert infos["episode_number"].tolist() == [3, 2, 2]
    assert infos["engine_seed"][1:].tolist() == engine_seeds[1:]
    games.close()
    untold = make_football_batch(SCENARIO, 2)
    untold.reset()
    assert all(shares_its_pool(env) for env in untold.envs)
    untold.close()


# In the collector.


class Planes(nn.Module):
    """A number for each action, from the newest planes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4 * 9 * 12, 19)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        coarse = nn.functional.max_pool2d(observation[..., -4:, :, :].float(), 8)
        return self.linear(coarse.flatten(-3) / 255)


ONE = partial(make_football, SCENARIO, engine="envpool")


def batch_of(num_envs: int) -> Any:
    return partial(make_football_batch, SCENARIO, num_envs)


def collector(
    num_envs: int, num_executors: int, *, envs: list[Any] | None = None, **options: Any
) -> HTSCollector:
    need("envpool")
    policy = ProbabilisticActor(
        TensorDictModule(Planes(), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
    )
    return HTSCollector(
        envs or [ONE] * num_envs,
        policy,
        frames_per_batch=num_envs * 40,
        total_frames=-1,
        num_executors=num_executors,
        num_actors=1,
        seed=3,
        **options,
    )


def test_i7_a_pool_of_four_is_four_pools_of_one() -> None:
    """Also after seeds are given again, although no game of a pool can begin anew."""

    def batches(num_executors: int, envs: list[Any] | None = None) -> TensorDictBase:
        with collector(4, num_executors, envs=envs) as games:
            iterator = iter(games)
            gathered = [next(iterator).clone() for _ in range(3)]
            games.set_seed(3)
            gathered += [next(iterator).clone() for _ in range(2)]
        assert torch.equal(gathered[0]["observation"][:, 0], gathered[3]["observation"][:, 0])
        return torch.stack(gathered)

    one, four = batches(1), batches(4)
    assert (one == four).all()
    assert one["next", "done"].any()
    for envs in ([batch_of(4)], [batch_of(2), ONE, batch_of(1)]):
        assert (batches(len(envs), envs) == one).all()


def test_games_whose_executor_is_killed_begin_anew() -> None:
    with collector(3, 1, on_executor_failure="restart") as games:
        batches = iter(games)
        next(batches)
        os.kill(games.worker_pids()["executor 0"], signal.SIGKILL)

        def until_replaced() -> None:
            while games.statistics().executor_restarts == 0:
                next(batches)

        with pytest.warns(RuntimeWarning, match="executor 0"):
            until_replaced()
        assert next(batches).shape == (3, 40)
        assert games.statistics().executor_restarts == 1
