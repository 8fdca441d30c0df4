"""I6 and I7: the same seed gives the same bits, whatever the workers and their timing."""

from __future__ import annotations

import itertools
import re
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from environments import EchoEnv
from policies import categorical
from probe import finished_steps
from processes import wait_until
from torchrl.envs import Compose, GymEnv, NoopResetEnv, StepCounter, TransformedEnv

from torchrl_hts import HTSCollector
from torchrl_hts.testing import TASKS, checks, digest, train
from torchrl_hts.testing.checks import main

pytestmark = pytest.mark.usefixtures("nothing_left")

# Each number of actors with each of executors, and each of either with delays and without them.
GRID = [
    (actors, executors, bool((index + number) % 2))
    for (index, actors), (number, executors) in itertools.product(
        enumerate((1, 2, 4)), enumerate((1, 2, 8))
    )
]
CORNERS = [(1, 1, False), (2, 2, True), (4, 8, True)]
# Of the command: without delays and with them.
FEW = ["--actors", "1", "--executors", "2", "--rounds", "2", "--num-envs", "4"]


@pytest.mark.parametrize(
    ("task", "grid"),
    [
        ("cartpole", GRID),
        ("continuous", CORNERS),
        ("lstm", CORNERS),
        ("draws", CORNERS),
        ("draws-torch", CORNERS),
        ("pong", [(1, 1, False), (4, 8, True)]),
    ],
)
def test_i7_batches_and_parameters_are_equal_bit_for_bit(
    task: str, grid: list[tuple[int, int, bool]]
) -> None:
    if task == "pong":
        pytest.importorskip("ale_py")
    runs = {
        (actors, executors, delays): train(
            TASKS[task], num_actors=actors, num_executors=executors, delays=delays, rounds=3
        )
        for actors, executors, delays in grid
    }
    reference = runs[grid[0]]
    assert {setting: run for setting, run in runs.items() if run != reference} == {}
    other = train(TASKS[task], num_actors=1, num_executors=2, delays=False, rounds=1, seed=1)
    assert not set(other) & set(reference), "another seed must differ in everything"


@pytest.mark.parametrize("task", ["cartpole", "continuous", "lstm"])
def test_i7_batches_of_environments_train_as_single_ones(task: str) -> None:
    """Of any size, with any workers and pauses in all of them."""
    expected = train(TASKS[task], num_actors=1, num_executors=1, delays=False, rounds=3)
    grid = [(8, 1, 1, False), (4, 2, 1, True), (4, 1, 2, False), (2, 2, 3, True)]
    for together, actors, executors, delays in grid if task == "cartpole" else grid[1::2]:
        found = train(
            TASKS[task],
            together=together,
            num_actors=actors,
            num_executors=executors,
            delays=delays,
            rounds=3,
        )
        assert found == expected, (together, actors, executors, delays)


def test_i7_batches_that_draw_from_global_generators_repeat_themselves() -> None:
    """They share them, so it matters which are batch-mates, and nothing else."""
    runs = [
        train(
            TASKS["draws"], together=4, num_actors=a, num_executors=e, delays=d, rounds=3
        )
        for a, e, d in [(1, 1, False), (2, 2, True)]
    ]  # fmt: skip
    assert runs[0] == runs[1]


@pytest.mark.parametrize("lag", [0, 2])
def test_i7_for_other_lags(lag: int) -> None:
    runs = [
        train(TASKS["cartpole"], num_actors=a, num_executors=e, delays=d, rounds=5, lag=lag)
        for a, e, d in CORNERS
    ]
    assert runs[0] == runs[1] == runs[2]


def test_i6_an_environments_data_does_not_depend_on_how_many_others_there_are() -> None:
    """Under a policy whose network gives the same bits at these sizes."""
    policy = categorical()
    rows = []
    for num_envs in (4, 6):
        with HTSCollector(
            [EchoEnv] * num_envs, policy, frames_per_batch=8 * num_envs, seed=0
        ) as collector:
            rows.append(next(iter(collector))[:2]["action"])
    assert torch.equal(rows[0], rows[1])


def test_the_command_compares_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["determinism", "--tasks", "cartpole", *FEW]) == 0
    output = capsys.readouterr().out
    assert "another seed: all differ" in output
    assert "all 2 runs equal by their bits" in output


def test_the_command_compares_batches_with_single_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """Where environments draw from global generators, each size of batches with itself."""
    assert main(["determinism", "--tasks", "cartpole", "draws", "--batch", "1", "2", *FEW]) == 0
    output = capsys.readouterr().out
    bits = re.findall(r"parameters (\w+)", output)
    assert bits[0] == bits[1] == bits[2] == bits[3]
    assert bits[4] == bits[5] != bits[6] == bits[7]
    assert output.count("draws from what a batch shares: each size has bits of its own") == 1
    assert "all 8 runs equal by their bits" in output


@pytest.mark.parametrize(("task", "different"), [("cartpole", 3), ("draws", 2)])
def test_the_command_tells_of_bits_that_differ(
    task: str,
    different: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = itertools.count()
    monkeypatch.setattr(checks, "train", lambda *_, **__: [f"{next(number)}"] * 2)
    assert main(["determinism", "--tasks", task, "--batch", "1", "2", *FEW]) == 1
    output = capsys.readouterr().out
    assert output.count("DIFFERENT") == different
    assert "FAILED" in output


def test_what_cannot_be_run_is_no_difference_of_bits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--tasks", "cartpole", "--actors", "1", "--executors", "1"]
    assert main(["determinism", *few, "--num-envs", "5000"]) == 2
    assert "error: the check could not be run: create_env_fn must have" in capsys.readouterr().err
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert main(["determinism", "--num-envs", "5000"]) == 2
    assert "left out: pong" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["determinism", "--tasks", "cartpole", "gfootball"])
    said = "error: --tasks gfootball needs gfootball_engine: make football"
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_check_on_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        assert main(["determinism", "--tasks", "cartpole", "--device", "cuda"]) == 2
        assert torch.are_deterministic_algorithms_enabled(), "TorchRL's update needs that there"
    finally:
        torch.use_deterministic_algorithms(before)
    assert "error: the check could not be run: " in capsys.readouterr().err


def test_batches_share_the_environments_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["determinism", "--num-envs", "8", "--batch", "4", "3"])
    assert "--batch 3 does not divide --num-envs 8: give a divisor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_envs", "together", "message"),
    [
        (9, 4, "together must divide num_envs, got 4 and 9: give a divisor"),
        (2, 3, "together must divide num_envs, got 3 and 2: give a divisor"),
        (8, 0, "together must be at least 1, got 0"),
        (0, 1, "num_envs must be at least 1, got 0"),
    ],
)
def test_a_training_has_whole_batches(num_envs: int, together: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(
            TASKS["cartpole"],
            num_actors=1,
            num_executors=1,
            delays=False,
            rounds=1,
            num_envs=num_envs,
            together=together,
        )


def test_digest_tells_bits_keys_and_shapes_apart() -> None:
    zero = torch.zeros(2)
    assert digest([zero]) == digest([zero.clone()])
    different = [[-zero], [zero.double()], [zero[:1]], [zero.view(1, 2)], [zero, zero]]
    assert len({digest(tensors) for tensors in [[zero], *different]}) == 6


def test_the_learners_process_is_left_alone() -> None:
    """TorchRL's ParallelEnv sets its number of threads, and draws from nobody's generator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    try:
        with HTSCollector([EchoEnv] * 2, categorical(), frames_per_batch=8, seed=0) as collector:
            next(iter(collector))
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)


def test_idle_workers_use_no_processor() -> None:
    """While the learner holds a batch and every slot is full, everybody sleeps."""
    with HTSCollector(
        [partial(EchoEnv, (50,))] * 4, categorical(), frames_per_batch=40, num_actors=2
    ) as collector:
        batches = iter(collector)
        next(batches)
        steps = finished_steps(collector)
        wait_until(lambda: min(list(steps)) == 20, 60)  # both slots are full

        def ticks() -> int:
            stats = [
                Path(f"/proc/{pid}/stat").read_text() for pid in collector.worker_pids().values()
            ]
            return sum(sum(map(int, stat.rpartition(")")[2].split()[11:13])) for stat in stats)

        before = ticks()
        time.sleep(0.5)  # a time to measure over, not to wait for anything
        assert ticks() - before <= 2


def noop_cartpole() -> TransformedEnv:
    """Draws from torch's global generator at every reset."""
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    return TransformedEnv(env, Compose(NoopResetEnv(5, random=True), StepCounter(20)))


def test_i7_torchs_global_generator_is_each_environments_own() -> None:
    policy = categorical(num_actions=2)

    def run(num_executors: int) -> str:
        with HTSCollector(
            [noop_cartpole] * 4, policy, frames_per_batch=160, seed=0, num_executors=num_executors
        ) as collector:
            return digest(next(iter(collector)))

    assert run(1) == run(2) == run(4)


def test_i7_holds_for_a_layer_that_starts_with_zeros() -> None:
    """All batch sizes agree on zeros; calibration must not be taken in by that."""
    runs = []
    for num_executors, num_actors in ((1, 1), (16, 2)):
        policy = categorical(num_actions=2)
        head = policy[0].module.net[-1]
        torch.nn.init.zeros_(head.weight)
        generator = torch.Generator().manual_seed(1)
        with HTSCollector(
            [partial(EchoEnv, (9,), action_space=gym.spaces.Discrete(2))] * 16,
            policy,
            frames_per_batch=16 * 20,
            total_frames=16 * 20 * 4,
            seed=0,
            num_executors=num_executors,
            num_actors=num_actors,
        ) as collector:
            digests = []
            for batch in collector:
                digests.append(digest(batch))
                head.weight.data.normal_(generator=generator)
        runs.append(digests)
    assert runs[0] == runs[1]
