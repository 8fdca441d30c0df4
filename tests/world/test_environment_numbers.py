"""Several learners: an environment has one number among all, whoever tells of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from environments import EchoEnv, FaultyEnv, OddEnv
from gymnasium.spaces import Discrete
from policies import categorical
from ranks import results, run_ranks
from tensordict.nn import TensorDictModule
from torch import Tensor

from torchrl_hts import HTSCollector, WorkerError, World, keep_servers
from torchrl_hts._rounds.event_rings import Activity

OWN, ALPHA = 2, 40  # environments of each of two ranks, steps of a round
GOOD = partial(FaultyEnv, "none")


class Holds(EchoEnv):
    """Can't be saved for what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()


def raise_late(observation: Tensor) -> Tensor:
    """A policy that fails in the midst of a round."""
    if (observation[:, 2] > ALPHA / 2).any():
        raise ValueError("too late")
    return torch.zeros(len(observation), dtype=torch.int64)


def collector(world: World, other: Callable[[], Any], policy: Any, events: int) -> HTSCollector:
    """One of which every rank's second environment is another one."""
    return HTSCollector(
        [GOOD, other] * world.size,
        policy,
        frames_per_batch=ALPHA * OWN * world.size,
        num_executors=1,
        timeline_events=events,
        world=world,
    )


def failure(
    world: World, other: Callable[[], Any], policy: Any = None
) -> tuple[str, tuple[int, ...]]:
    """What is said of it, and the numbers that a program is told."""
    try:
        with collector(world, other, policy or categorical(), 0) as data:
            next(iter(data))
    except Exception as error:
        numbers = error.env_indices if isinstance(error, WorkerError) else ()
        return str(error), numbers
    raise AssertionError("nothing has failed")


def tell(directory: str) -> dict[str, Any]:
    """All that is told of environments on a rank, where its second one has failed, or runs."""
    lock = Lock()
    with World(timeout_s=60) as world, keep_servers():
        told: dict[str, Any] = {
            "raises": failure(world, partial(FaultyEnv, "raise")),
            "exits": failure(world, partial(FaultyEnv, "exit")),
            "can't be made": failure(world, partial(FaultyEnv, "init")),
            "can't be sent": failure(world, lambda: lock),
            "is none": failure(world, dict),
            "differs": failure(world, partial(OddEnv, "action_space", Discrete(5))),
            "makes the policy raise": failure(
                world, GOOD, TensorDictModule(raise_late, ["observation"], ["action"])
            ),
        }
        with collector(world, Holds, categorical(), 100) as data:
            next(iter(data))
            file = Path(directory, f"{world.rank}.json")
            found = data.timeline(file)
            told["can't be saved"] = data.state_dict()["why_environments_are_lost"], ()
    trace = [event["args"] for event in json.loads(file.read_text())["traceEvents"]]
    told["trace"] = {args["environment"] for args in trace if "environment" in args}
    told["timeline"] = {*found.of(Activity.STEP)["env"].tolist()}
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    outcomes = run_ranks(tell, 2, str(tmp_path_factory.mktemp("timelines")))
    return results(outcomes)


# One and two: the numbers of the rank's two environments.
@pytest.mark.parametrize(
    ("fault", "said", "numbers"),
    [
        ("raises", "environment {two} failed in round 0, step 2, in executor 0 ", "two"),
        ("exits", "steps environment(s) {one}, {two}, ended with exit code 7", "one two"),
        ("exits", " while environment {two} was stepped in round 0, step 2", "one two"),
        ("can't be made", "environment {two} failed while it was made, in executor 0 ", "two"),
        ("can't be sent", "create_env_fn[{two}] can't be pickled", ""),
        ("can't be sent", "It is create_env_fn[{two}]: its variable 'lock'", ""),
        ("is none", "create_env_fn[{two}] made a builtins.dict; expected", "two"),
        ("differs", "environment {two} differs from environment {one} in its action_space", ""),
        ("differs", "\n  environment {two}: Discrete(5)", ""),
        ("makes the policy raise", "environment(s) {one}, {two}, in actor 0 ", "one two"),
        ("can't be saved", "environment {two}: environment layer ", ""),
    ],
)
def test_what_fails_is_named(
    told: list[dict[str, Any]], fault: str, said: str, numbers: str
) -> None:
    for rank, on_rank in enumerate(told):
        names = {"one": rank * OWN, "two": rank * OWN + 1}
        message, indices = on_rank[fault]
        assert said.format(**names) in message
        assert indices == tuple(names[name] for name in numbers.split())


@pytest.mark.parametrize("of", ["timeline", "trace"])
def test_whose_steps_a_timeline_shows(told: list[dict[str, Any]], of: str) -> None:
    assert [on_rank[of] for on_rank in told] == [{0, 1}, {2, 3}]
