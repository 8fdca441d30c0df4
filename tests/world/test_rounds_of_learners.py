"""Ranks that come to do different things in a round, or to have different policies, are told so."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from environments import EchoEnv
from policies import categorical
from ranks import results, run_ranks

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
        rf"'gradients of \d+ values in pass {at}'" for at in ("3 of round 2", "1 of round 3")
    )
    assert re.match(f"rank 1 is at {there}, and this one at {here}: every rank must do", first)
    assert re.match(f"rank 0 is at {here}, and this one at {there}: every rank must do", second)


@pytest.mark.parametrize("length", [135, 1000])
def test_a_rank_that_sums_something_else_is_named_whatever_its_length(length: int) -> None:
    """Of the gradients' length it would be taken for them, of another gloo would end the others."""
    outcomes = results(run_ranks(train, 2, None, f"a mean of {length}"))
    its = f"a mean of {length:,} values in pass 3 of round 2"
    own = "gradients of 135 values in pass 1 of round 3"
    assert outcomes[0].startswith(f"rank 1 is at '{its}', and this one at '{own}'")
    assert outcomes[1].startswith(f"rank 0 is at '{own}', and this one at '{its}'")


@pytest.mark.parametrize("shards", [None, 2])
def test_parameters_that_one_rank_alone_changes_are_noticed_later(shards: int | None) -> None:
    for said in results(run_ranks(train, 2, shards, "parameters")):
        assert said.startswith("after 4 updates the learners have different policies: rank 1 has ")
