"""Forecasts behave as what they are made of, and the command line says what is wrong."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import EchoEnv
from policies import categorical
from tensordict.nn import TensorDictModule
from torchrl.modules import ProbabilisticActor
from torchrl_environments import Clocks

from torchrl_hts._planning.costs import PassCosts
from torchrl_hts._processes.limits import available_cores
from torchrl_hts._processes.linux import ON_LINUX
from torchrl_hts.bench import __main__ as bench
from torchrl_hts.bench.__main__ import main
from torchrl_hts.bench.forecast import Costs, Setting, forecast, recommend
from torchrl_hts.bench.measuring import default_policy, measure_environment, measure_learning
from torchrl_hts.bench.other_load import busy_share, cores_used_by_others
from torchrl_hts.bench.report import Tried, batches_text, recommendation, warnings_text
from torchrl_hts.theory import timetable

SLEEPS = Costs(
    step_times=np.random.default_rng(0).exponential(0.01, 20_000),
    step_cpu_share=0.0,
    executor_cpu_s=0.0,
    passes=PassCosts((1, 16), (0.0, 0.0)),
    actor_cpu_s=0.0,
    learner_step_s=0.3 * 0.01 / 16,
    cores=2,
)
COMPUTES = replace(SLEEPS, step_times=np.full(100, 1e-3), step_cpu_share=1.0, learner_step_s=0.0)


@pytest.mark.parametrize(("lag", "barrier", "share"), [(0, None, 0.58), (1, None, 0.91)])
def test_with_nothing_but_the_schedule_it_is_the_recursion(
    lag: int, barrier: None, share: float
) -> None:
    """The table's workload: exponential times, 16 environments, alpha 20, learner 0.3 alpha."""
    found = forecast(SLEEPS, Setting(16, 20, lag), barrier=barrier)
    assert found.schedule_share == pytest.approx(share, abs=0.02)
    assert found.steps_per_second == pytest.approx(1600 * share, rel=0.03)
    assert found.limit == "schedule"


def test_the_barrier_costs_what_the_recursion_says() -> None:
    found = forecast(SLEEPS, Setting(16, 20), barrier="round")
    assert found.schedule_share == pytest.approx(0.70, abs=0.02)


def test_cores_are_a_limit() -> None:
    """Environments that compute for 1 ms: two cores make 2,000 steps/s, and not one more."""
    found = forecast(COMPUTES, Setting(16, 20))
    assert (found.limit, COMPUTES.team(16).executors) == ("cores", 2)
    assert found.steps_per_second == pytest.approx(2000, rel=0.01)
    both = forecast(replace(COMPUTES, learner_step_s=0.5e-3), Setting(16, 20))
    assert (both.limit, both.steps_per_second) == ("cores", pytest.approx(2 / 1.5e-3, rel=0.01))


def test_long_rounds_are_forecast_from_some_of_their_steps() -> None:
    """All of them would be 10 GB; spread over 64 sums they even out."""
    long = replace(SLEEPS, learner_step_s=1e-9, cores=64)
    tracemalloc.start()
    try:
        found = forecast(long, Setting(64, 1_000_000))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1 << 28
    assert found.schedule_share == pytest.approx(1, abs=0.01)
    some = [forecast(long, Setting(64, alpha)).schedule_share for alpha in (20_000, 5_000)]
    assert 1 > found.schedule_share > some[0] > some[1]


def test_the_learner_is_a_limit() -> None:
    found = forecast(replace(SLEEPS, learner_step_s=2e-3), Setting(16, 20))
    assert (found.limit, found.steps_per_second) == ("learner", pytest.approx(500, rel=0.03))


def test_inference_is_a_limit() -> None:
    """A pass of 20 ms, however many rows: at most 16 come at each; two actors halve the wait."""
    slow = replace(SLEEPS, passes=PassCosts((1, 16), (0.02, 0.02)), learner_step_s=0.0, cores=64)
    one, two = (forecast(slow, Setting(16, 20, num_actors=m)) for m in (1, 2))
    assert one.limit == "inference"
    assert one.steps_per_second < 16 / 0.02
    assert one.steps_per_second < two.steps_per_second < 16 / 0.03
    beyond = replace(slow, passes=PassCosts((1, 8), (0.02, 0.02)))
    assert beyond.pass_time(16) == 0.04, "twice the rows that were measured take twice the time"


def test_steps_that_overlap_need_no_executor_each() -> None:
    alone = replace(SLEEPS, step_cpu_share=0.01, cores=4)
    overlapping = replace(alone, overlaps=True)
    assert (alone.team(16).executors, overlapping.team(16).executors) == (16, 1)
    assert forecast(overlapping, Setting(16, 20)) == forecast(alone, Setting(16, 20))


def test_recommended_is_the_least_of_the_nearly_best() -> None:
    grid = [
        forecast(SLEEPS, Setting(n, alpha, lag, actors))
        for n in (4, 16)
        for alpha in (5, 20, 128)
        for lag in (0, 1, 2)
        for actors in (1, 2)
    ]
    best = recommend(grid).setting
    assert best == Setting(16, 128, 1, 1), "lag 0 is much slower, two actors are no faster"
    with pytest.raises(ValueError, match="no forecast"):
        recommend([])


def test_environments_are_timed_with_resets_apart() -> None:
    times = measure_environment(lambda: EchoEnv(lengths=(10,)), 0.0)
    assert len(times.steps) == 200
    assert len(times.resets) == 20  # the episode that the warm-up ended leaves none half done
    total = times.with_resets().sum()
    assert total == pytest.approx(times.steps.sum() + times.resets.sum())
    assert 0 < times.cpu_share <= 1
    timetable(times.with_resets()[:, None])


class SampledEnv(gym.Env):
    """Gives samples of its space."""

    def __init__(self, observation: gym.Space, action: gym.Space) -> None:
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("observation", "action", "shape"),
    [
        (gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(5), ()),
        (gym.spaces.Box(-1, 1, (2, 3)), gym.spaces.Box(-1, 1, (2,)), (2,)),
        (gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(5), ()),
        (gym.spaces.Box(0, 255, (72, 96, 3), np.uint8), gym.spaces.Discrete(5), ()),
    ],
)
def test_default_policies(
    observation: gym.Space, action: gym.Space, shape: tuple[int, ...]
) -> None:
    env = SampledEnv(observation, action)
    policy = default_policy(env)
    observations = torch.from_numpy(np.stack([observation.sample()] * 6))
    written = policy(observation=observations)
    assert written[-2].shape == (6, *shape) or written[0].shape == (6, *shape)
    if len(observation.shape) < 3:  # the others are slow
        assert measure_learning(lambda: env, policy, 0.0) > 0


def make_policy() -> torch.nn.Module:
    return categorical(num_inputs=4, num_actions=2)


def test_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    """From start to end in seconds, with a factory and a policy by name."""
    flags = "--seconds 0.1 --num-envs 2 4 --alpha 5 --lag 1 --actors 1"
    named = "--env-id test_bench:EchoFactory --policy test_bench:make_echo_policy"
    assert main([*flags.split(), *named.split()]) == 0
    printed = capsys.readouterr()
    first, *rest = printed.out.splitlines()
    assert re.fullmatch(
        r"Take [24] environments, alpha 5, lag 1, 1 actor: [\d,]+ steps/s are expected, limited by "
        r"(the cores|the learner|inference|waiting for each other)\.",
        first,
    )
    assert "steps/s measured" in printed.out
    assert "[5/5]" in printed.err
    told = "\n".join(rest)
    assert told.index("HTSCollector(") < told.index("\nstep  ") < told.index("Claim 1")
    assert max(map(len, rest)) <= 110


def make_batch() -> gym.vector.VectorEnv:
    return gym.vector.SyncVectorEnv([EchoEnv] * 3)


def test_batches_that_step_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether larger ones would pay is said where this machine could tell."""
    flags = "--seconds 0.1 --num-envs 1 2 --alpha 5 --lag 1 --actors 1"
    named = "--env-id test_bench:make_batch --policy test_bench:make_echo_policy"
    assert main([*flags.split(), *named.split()]) == 0
    printed = capsys.readouterr()
    first, *rest = printed.out.splitlines()
    assert re.match(r"Take (1 batch|2 batches) of 3, alpha 5, lag 1, 1 actor: ", first)
    told = "\n".join(rest)
    assert re.search(
        r"HTSCollector\(\[make_batch\] \* ([12]), policy,\n *frames_per_batch=\1 \* 3 ", told
    )
    tells = "Warning: other programs" not in told and "collector 0 us of an executor" not in told
    assert tells == ("which 3 environments share: larger batches would " in told)
    assert re.search(r"policy +3 rows .*, 6 rows ", told)
    assert "the batch of 3 environments at random" in printed.err


def make_clocks() -> Clocks:
    return Clocks(3, 5, 9, num_agents=2)


def make_agents_policy() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LogSoftmax(-1))
    return ProbabilisticActor(
        TensorDictModule(net, [("agents", "observation")], [("agents", "logits")]),
        in_keys=[("agents", "logits")],
        out_keys=[("agents", "action")],
        distribution_class=torch.distributions.Categorical,
    )


@pytest.mark.parametrize(
    ("made", "policy", "batch"),
    [
        ("torchrl_environments:cartpole", "make_policy", 1),
        ("test_bench:make_clocks", "make_agents_policy", 3),
    ],
)
def test_torchrl_environments(
    made: str, policy: str, batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One alone, and a batch with agents."""
    flags = "--seconds 0.1 --num-envs 1 2 --alpha 5 --lag 1 --actors 1"
    assert main([*flags.split(), "--env-id", made, "--policy", f"test_bench:{policy}"]) == 0
    printed = capsys.readouterr()
    unit = "environments?" if batch == 1 else "batch(es)? of 3"
    assert re.match(rf"Take [12] {unit}, alpha 5, lag 1, 1 actor: ", printed.out)
    assert "steps/s measured" in printed.out


@pytest.mark.parametrize(("own_s", "said"), [(1e-3, "would pay"), (1e-4, "would hardly pay")])
def test_whether_batches_would_pay_is_said(own_s: float, said: str) -> None:
    """They share the executor's own part: half of what a step costs, or a tenth."""
    (told,) = batches_text(replace(COMPUTES, executor_cpu_s=own_s), busy=False)
    assert f" batches {said}" in told
    (told,) = batches_text(replace(COMPUTES, executor_cpu_s=own_s, batch=8), busy=False)
    assert f"larger batches {said}" in told


@pytest.mark.parametrize("batch", [1, 8])
def test_nothing_is_said_of_batches_where_it_was_not_measured(batch: int) -> None:
    """On a busy machine, or where the executor's own part came out as nothing."""
    costs = replace(COMPUTES, executor_cpu_s=1e-4, batch=batch)
    assert batches_text(costs, busy=False)
    assert not batches_text(costs, busy=True)
    assert not batches_text(replace(costs, executor_cpu_s=0.0), busy=False)


def test_a_batch_makes_the_steps_of_all_its_environments() -> None:
    alone = forecast(COMPUTES, Setting(4, 20))
    found = forecast(replace(COMPUTES, batch=8), Setting(4, 20))
    assert found.steps_per_second == 8 * alone.steps_per_second


def test_the_recommended_code_is_the_recommended_setting() -> None:
    best = forecast(SLEEPS, Setting(16, 20, 1, 2))
    code = recommendation(best, 3, None).split("\n\n")[1]
    (call,) = ast.parse(textwrap.dedent(code)).body
    given = {word.arg: ast.unparse(word.value) for word in call.value.keywords}
    assert given == {
        "frames_per_batch": "16 * 20", "lag": "1", "num_actors": "2", "num_executors": "3",
    }  # fmt: skip


@pytest.mark.parametrize(("others", "cores", "warns"), [
    (None, 2, False), (0.1, 2, False), (0.3, 2, True), (1.0, 16, False), (4.0, 16, True),
])  # fmt: skip
def test_others_that_use_the_cores_are_warned_of(
    others: float | None, cores: float, warns: bool
) -> None:
    told = warnings_text(others, cores, Tried(100.0, 100.0))
    assert [each.startswith(f"Warning: other programs use {others}") for each in told] == (
        [True] * warns
    )


@pytest.mark.parametrize(
    ("measured", "said"),
    [(1000, ""), (1400, ""), (1600, "1.6 times more"), (700, ""), (500, "2.0 times less")],
)
def test_a_forecast_that_is_far_off_is_warned_of(measured: float, said: str) -> None:
    told = warnings_text(0.0, 2, Tried(measured, 1000.0))
    assert bool(told) == bool(said)
    assert said in "".join(told)
    assert not warnings_text(0.0, 2, None)


def test_what_others_use_is_read_from_the_cores_that_are_ours() -> None:
    before = "cpu 9 9 9 9\ncpu0 10 0 10 80 0 0 0 0 5 0\ncpu1 0 0 0 0 0 0 0 0 0 0\nintr 3"
    after = "cpu 9 9 9 9\ncpu0 10 0 10 180 0 0 0 0 5 0\ncpu1 30 0 10 20 30 0 5 5 30 0\nintr 4"
    assert busy_share(before, after, {0}) == 0
    assert busy_share(before, after, {1}) == 0.5
    assert busy_share(before, after, {0, 1}) == 0.25
    assert busy_share(before, before, {0}) == 0


@pytest.mark.skipif(not ON_LINUX, reason="needs Linux's /proc")
def test_a_busy_process_is_seen() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        used = cores_used_by_others(0.3)
    finally:
        busy.kill()
        busy.wait()
    assert used is not None
    assert used > 0.3 * min(1, available_cores())


EchoFactory = EchoEnv


def make_echo_policy() -> torch.nn.Module:
    return categorical()


def make_whole() -> gym.Env:
    return SampledEnv(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(0, 9, (2,), np.int64))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id NoSuchEnv-v3", "NoSuchEnv"),
        ("--env-id no_such_module:make", "No module named 'no_such_module'"),
        ("--env-id environments:no_such_function", "no attribute 'no_such_function'"),
        ("--env-id environments:DictEnv", "--policy module:function"),
        ("--env-id builtins:dict", "only environments of gymnasium and TorchRL, and batches"),
        ("--env-id torchrl_environments:cartpole", "no default policy for TorchRL environments"),
        ("--env-id CartPole-v1 --policy make_policy", "expected module:function"),
        ("--env-id CartPole-v1 --policy policies:no_such_function", "no attribute"),
        ("--env-id CartPole-v1 --policy environments:EchoEnv", "gave no policy"),
        ("--env-id CartPole-v1 --policy sys:path", "--policy 'sys:path' is ["),
        ("--env-id sys:exit", "--env-id 'sys:exit' can't be made: SystemExit"),
        (
            "--env-id CartPole-v1 --policy sys:exit",
            "--policy 'sys:exit' gave no policy: SystemExit",
        ),
        ("--env-id test_bench:make_whole", "no default policy for the action space Box(0, 9, (2,)"),
    ],
)
def test_errors_say_what_is_wrong(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags.split()) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_a_policy_that_does_not_fit_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--env-id Pendulum-v1 --policy test_bench:make_policy --seconds 0.01 --num-envs 2"
    assert main(flags.split()) == 2
    assert "error: the policy failed in a trial run" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-2", "1.5", "many"])
def test_a_count_is_a_whole_number_of_at_least_1(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--env-id", "CartPole-v1", "--num-envs", value])
    assert f"expected a whole number of at least 1, got '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--num-envs", "--actors"])
def test_more_than_a_collector_takes_is_refused_before_anything_is_measured(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--env-id", "NoSuchEnv-v3", flag, "16", "5000"])
    assert f"{flag} must be at most 2048, got 5000" in capsys.readouterr().err


def test_ctrl_c_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_alone", measure)
    assert main(["--env-id", "CartPole-v1"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
