"""Ranks that come to do different things in a round, or to have different policies, are told so."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from environments import EchoEnv
from policies import categorical
from ranks import results, run_ranks
from tensordict import TensorDict
from torch import nn

from torchrl_hts import DelayedGradient, HTSCollector, World, WorldError, keep_servers

NUM_ENVS, ALPHA, ROUNDS, PASSES = 4, 4, 6, 3
PATIENCE_S = 4.0


def train(shards: int | None, fault: str) -> str:
    """A loop of several passes over each batch; in round 2 rank 1 has a fault.

    Returns what the world says of it.
    """
    policy = categorical()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with (
        keep_servers(),
        World(shards=shards, timeout_s=PATIENCE_S) as world,
        HTSCollector(
            [EchoEnv] * NUM_ENVS,
            policy,
            frames_per_batch=NUM_ENVS * ALPHA,
            total_frames=NUM_ENVS * ALPHA * ROUNDS,
            seed=0,
            num_executors=1,
            world=world,
        ) as collector,
    ):
        delayed = DelayedGradient(policy)
        try:
            for round_, batch in enumerate(collector):
                faulty = world.rank == 1 and round_ == 2
                with delayed(batch):
                    for number in range(PASSES):
                        if faulty and fault == "a pass is left out" and number == PASSES - 1:
                            break
                        step(world, policy, optimizer, batch)
                    if faulty and fault == "parameters":
                        torch.nn.init.zeros_(next(policy.parameters()))
                    if faulty and fault.startswith("a mean"):
                        world.mean([torch.ones(int(fault.split()[-1]))])
        except WorldError as error:
            return str(error)
    return "went on"


def step(world: World, policy: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    for part in world.gradients(policy, batch):
        log_prob = policy.get_dist(part.clone()).log_prob(part["action"])
        log_prob.mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("shards", [None, 2])
def test_a_rank_that_leaves_out_a_pass_is_named(shards: int | None) -> None:
    first, second = results(run_ranks(train, 2, shards, "a pass is left out"))
    here, there = (
        rf"'gradients \(module 1\) of \d+ values in pass {at}'"
        for at in ("3 of round 2", "1 of round 3")
    )
    assert re.match(f"rank 1 is at {there}, and this one at {here}: every rank must do", first)
    assert re.match(f"rank 0 is at {here}, and this one at {there}: every rank must do", second)


@pytest.mark.parametrize("length", [135, 1000])
def test_a_rank_that_sums_something_else_is_named_whatever_its_length(length: int) -> None:
    """Of the gradients' length it would be taken for them, of another gloo would end the others."""
    outcomes = results(run_ranks(train, 2, None, f"a mean of {length}"))
    its = f"a mean of {length:,} values in pass 3 of round 2"
    own = "gradients (module 1) of 135 values in pass 1 of round 3"
    assert outcomes[0].startswith(f"rank 1 is at '{its}', and this one at '{own}'")
    assert outcomes[1].startswith(f"rank 0 is at '{own}', and this one at '{its}'")


@pytest.mark.parametrize("shards", [None, 2])
def test_parameters_that_one_rank_alone_changes_are_noticed_later(shards: int | None) -> None:
    for said in results(run_ranks(train, 2, shards, "parameters")):
        assert said.startswith("after 4 updates the learners have different policies: rank 1 has ")


def train_others(shards: int | None, fault: str) -> str:
    """Two modules of one shape; after a common pass over both rank 1 has a fault."""
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    with World(shards=shards, timeout_s=PATIENCE_S) as world:
        odd = world.rank == 1
        try:
            for faulty in (False, True):
                if faulty and fault == "frozen":
                    first[0 if odd else 1].requires_grad_(False)
                turned = faulty and odd and fault == "order"
                for module in (second, first) if turned else (first, second):
                    for part in world.gradients(module, TensorDict({"x": torch.ones(4, 3)}, [4])):
                        module(part["x"]).sum().backward()
        except WorldError as error:
            return str(error)
    return "went on"


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("fault", ["frozen", "order"])
def test_gradients_of_as_many_other_parameters_are_not_added(
    shards: int | None, fault: str
) -> None:
    told = results(run_ranks(train_others, 2, shards, fault))
    if fault == "order":
        own, its = (rf"'gradients \(module {n}\) of 28 values'" for n in (1, 2))
    else:
        own = its = r"'gradients \(module 1, 2 of 4 parameters trained: (\w+)\) of 14 values'"
    assert (found := re.match(f"rank 1 is at {its}, and this one at {own}", told[0]))
    assert re.match(f"rank 0 is at {own}, and this one at {its}", told[1])
    assert len({*found.groups()}) == len(found.groups())
