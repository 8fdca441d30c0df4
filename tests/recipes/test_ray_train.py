"""recipes/ray_train.py: learners that Ray Train starts; where ray is installed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from processes import processes_below, wait_until, wait_until_gone
from recipe_runs import assert_equal_runs, run, start

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
    wait_until(lambda: any(directory.glob("checkpoints/*.pt")), timeout_s=500)
    everything = processes_below(process.pid)
    os.kill(learners_below(process.pid)[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "resumed from" in output
    assert_equal_runs(whole, directory)
    assert any(directory.glob("ray/*/checkpoint_*/step-*.pt"))  # Ray's copy
    wait_until_gone(everything)


def test_a_directory_has_to_be_named() -> None:
    pytest.importorskip("ray.train", reason=REASON)
    output, _ = start("ray_train.py ppo_cartpole --shards 4").communicate(timeout=250)
    assert output.splitlines()[-1] == (
        "error: name a directory that all learners reach: --output-dir /shared/run"
    )
