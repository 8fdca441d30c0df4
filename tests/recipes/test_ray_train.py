"""recipes/ray_train.py: learners that Ray Train starts; where ray is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import script_paths  # noqa: F401  so that the scripts are found
from processes import processes_below, wait_until, wait_until_gone
from recipe_runs import assert_equal_runs, run, start
from support.errors import RecipeError
from support.ray_start import check_room, scaling

ray_train = importlib.import_module("ray_train")

REASON = "ray.train is not installed: pip install 'torchrl_hts[ray]'"
FLAGS = "--num-envs 8 --minibatch-size 64 --shards 4 --total-frames 3072 --checkpoint-interval 512"
FLAGS += " --log-interval 512 --eval-interval 2048 --eval-episodes 2"


def learners_below(pid: int) -> list[int]:
    """Processes that Ray Train has started to learn."""
    titles = {each: Path(f"/proc/{each}/cmdline") for each in processes_below(pid)}
    found = []
    for each, title in titles.items():
        try:
            if title.read_bytes().startswith(b"ray::RayTrainWorker"):
                found.append(each)
        except OSError:  # it has ended meanwhile
            continue
    return sorted(found)


@pytest.mark.timeout(1200)  # Ray and all learners start twice, on a machine that may be busy
def test_ray_train_gives_the_bits_of_one_learner_also_if_a_learner_is_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray.train", reason=REASON)
    whole, directory = tmp_path / "whole", tmp_path / "run"
    run(f"ppo_cartpole.py {FLAGS}", "--output-dir", str(whole))
    flags = [*FLAGS.split(), "--output-dir", str(directory)]
    process = start("ray_train.py --learners 2 --cpus 0.5 ppo_cartpole", *flags)
    try:
        wait_until(lambda: any(directory.glob("checkpoints/*.pt")), timeout_s=500)
        everything = processes_below(process.pid)
        os.kill(learners_below(process.pid)[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=600)
    finally:  # whatever was waited for in vain; Ray's own processes end with it
        process.terminate()
    assert process.returncode == 0, output
    assert "resumed from" in output
    assert_equal_runs(whole, directory)
    assert any(directory.glob("ray/*/checkpoint_*/step-*.pt"))  # Ray's copy
    wait_until_gone(everything)


def test_a_cluster_that_is_not_there_is_told_at_once(nobodys_address: str) -> None:
    pytest.importorskip("ray.train", reason=REASON)
    flags = ["--address", nobodys_address, "ppo_cartpole", *DIRECTORY]
    said = f"there is no Ray cluster at address='{nobodys_address}'"
    with pytest.raises(RecipeError, match=said):
        ray_train.main(parsed(*flags))


def test_learners_that_find_no_room_are_refused(tmp_path: Path) -> None:
    """Ray would try again without end."""
    ray = pytest.importorskip("ray", reason=REASON)
    pytest.importorskip("ray.train", reason=REASON)
    flags = ["--learners", "64", "ppo_cartpole", "--num-envs", "64", "--minibatch-size", "512"]
    try:
        with pytest.raises(
            RecipeError, match="64 learners ask for 64000 of CPU, and the cluster has "
        ):
            ray_train.main(parsed("--cpus", "1000", *flags, "--output-dir", str(tmp_path / "run")))
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learners", "0"], "--learners: must be at least 1, and is 0"),
        (["--cpus", "-1"], "--cpus must be at least 0, and finite, got -1"),
        (["--cpus", "nan"], "--cpus must be at least 0, and finite, got nan"),
        (["--max-failures", "-2"], "--max-failures must be at least -1, got -2"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*flags, "ppo_cartpole")
    assert message in capsys.readouterr().err
    assert parsed("--max-failures", "-1", "--cpus", "0", "ppo_cartpole").max_failures == -1


DIRECTORY = ["--output-dir", "run"]


def parsed(*arguments: str) -> Namespace:
    """The command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ray_train.py", *arguments])
        return ray_train.parse()


def main(recipe: str, *arguments: str) -> None:
    """Without Ray, which would start a cluster."""
    options = Namespace(recipe=recipe, arguments=[*arguments], learners=2, cpus=1.0, address=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        ray_train.main(options)


@pytest.mark.parametrize(
    ("flags", "has", "said"),
    [
        (
            ["--learners", "2", "--cpus", "2"],
            {"CPU": 3},
            "2 learners ask for 4 of CPU, .* less --c",
        ),
        (["--learners", "25", "--cpus", "0.28"], {"CPU": 7}, None),  # in floats a little more
        (["--learners", "1", "--device", "cuda"], {"CPU": 9}, "1 of GPU, .*, no --device of a GPU"),
        (["--learners", "2", "--address", "auto"], {"CPU": 1}, None),  # it may grow
    ],
)
def test_there_must_be_room_for_learners(
    flags: list[str], has: dict[str, float], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = SimpleNamespace(cluster_resources=lambda: has)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    device = flags.pop() if "--device" in flags else "cpu"
    options = parsed(*[flag for flag in flags if flag != "--device"], "ppo_cartpole")
    refused = pytest.raises(RecipeError, match=said) if said else contextlib.nullcontext()
    with refused:
        check_room(options, Namespace(device=device))


def test_learners_that_cannot_share_the_shards_are_refused() -> None:
    with pytest.raises(
        RecipeError, match="--shards 1 can't be shared out equally among 2 learners"
    ):
        main("ppo_cartpole", "--shards", "1", *DIRECTORY)


def test_a_directory_has_to_be_named() -> None:
    with pytest.raises(RecipeError, match="name a directory that all learners reach: --output-dir"):
        main("ppo_cartpole", "--shards", "4")


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("ppo_cartpole", ["--env-id", "CartPoll-v1"], "error: .*`CartPoll` doesn't exist"),
        ("mappo", [], r"error: this needs the package vmas: pip install 'torchrl_hts\[vmas\]'"),
    ],
)
def test_what_cannot_be_made_is_told_before_a_cluster_is_started(
    recipe: str, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "vmas" else find(n))
    with pytest.raises(SystemExit, match=message):
        main(recipe, *flags, *DIRECTORY)


def test_ray_is_missing() -> None:
    with pytest.raises(RecipeError, match=r"provides 'ray': pip install 'torchrl_hts\[ray\]'"):
        main("ppo_cartpole", *DIRECTORY)


@pytest.mark.parametrize(
    ("recipe", "flags", "gpus"),
    [
        ("ppo_cartpole", [], False),
        ("ppo_football", [], False),
        ("ppo_football", ["--device", "cuda"], True),
        ("ppo_football", ["--policy-device", "cuda"], True),
    ],
)
def test_each_learner_gets_a_gpu_where_a_device_is_one(
    recipe: str, flags: list[str], gpus: bool
) -> None:
    run = ray_train.checked(recipe, [*flags, *DIRECTORY])
    assert scaling(Namespace(learners=3, cpus=2.0), run) == {
        "num_workers": 3,
        "resources_per_worker": {"CPU": 2.0},
        "use_gpu": gpus,
    }
