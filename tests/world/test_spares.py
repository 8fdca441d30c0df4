"""More learners than divide the shards: some learn, and the others wait."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from probe import summed
from processes import wait_until
from ranks import run_ranks

from torchrl_hts._world.tree import tree_sum
from torchrl_hts._world.world import World

PATIENCE_S = 60.0
RESTARTS = "TORCHELASTIC_MAX_RESTARTS"


def vector(part: int) -> torch.Tensor:
    return torch.randn(1001, generator=torch.Generator().manual_seed(part))


def add() -> dict[str, Any]:
    """Only one rank knows that torchrun would start all again."""
    if os.environ["RANK"] == "1":
        os.environ[RESTARTS] = "3"
    with World(shards=4, timeout_s=PATIENCE_S) as world:
        own = world.own([vector(part) for part in range(4)])
        return {
            "sum": summed(world, own, "vectors").numpy().tobytes(),
            "size": world.size,
            "local": world.local_size,
        }


@pytest.mark.parametrize(("started", "learn"), [(3, 2), (5, 4)])
def test_as_many_learn_as_divide_the_shards(started: int, learn: int) -> None:
    expected = tree_sum([vector(part) for part in range(4)]).numpy().tobytes()
    outcomes = run_ranks(add, started)
    for outcome in outcomes[:learn]:
        assert outcome.result == {"sum": expected, "size": learn, "local": learn}, outcome
    for outcome in outcomes[learn:]:
        assert outcome.error == "ended with 0"


def end(how: str) -> None:
    os.environ[RESTARTS] = "3"
    with World(shards=2, timeout_s=PATIENCE_S) as world:
        world.gather(None)
        if how == "raises":
            raise ValueError("it diverges")
        if how == "is stopped":
            world.close(ended=False)
        if how == "dies" and world.is_first:
            os._exit(3)


@pytest.mark.parametrize("how", ["raises", "is stopped", "dies"])
def test_a_spare_fails_with_the_run_so_that_it_is_started_again(how: str) -> None:
    assert run_ranks(end, 3, how)[2].error == "ended with 1"


def interrupt(directory: Path) -> None:
    os.environ[RESTARTS] = "3"
    file = directory / os.environ["RANK"]
    file.write_text(str(os.getpid()))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with World(shards=1, timeout_s=PATIENCE_S):  # rank 1 waits in it
        pid = int((directory / "1").read_text())
        os.kill(pid, signal.SIGINT)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=PATIENCE_S)


def test_ctrl_c_ends_a_spare_while_others_learn(tmp_path: Path) -> None:
    first, spare = run_ranks(interrupt, 2, tmp_path)
    assert first.error == ""
    assert spare.error == "ended with 1"
